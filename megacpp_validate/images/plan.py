"""From rows of the matrix, pins and locks to what is built, and to the bake file. Nothing is fetched."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from .. import __version__
from ..catalog.bridge import Catalog, Target, matrix_folder, read_catalog
from ..catalog.images import MACHINES, Image, Images
from ..environments.fits import StackFit
from ..evidence.values import Frozen
from .fits import judge_stacks, read_all_images, stack_of_image
from .locks import ImageLock, check_lock, gather_inputs, read_image_lock, read_project
from .pins import FILE as PINS_FILE
from .pins import Pins, read_pins, refuse_unclaimed
from .tools import ARCH_LABEL, BASE_LABEL, LOCK_LABEL, MIRROR, PINS_LABEL, TARGET_LABEL, ImageRefused, use_mirror

BAKE_FILE: Final = "containers/docker-bake.json"
DOCKERFILE: Final = "containers/Dockerfile"

_OWN: Final = re.compile(r"^[^\s@]+@sha256:[0-9a-f]{64}$")
_OCI: Final = "org.opencontainers.image"
# Step -> the argument that names its stage, where a stage of the recipe makes it.
_STAGES: Final = {"te": "TE", "flash_attention_3": "FLASH_ATTENTION_3", "deep_gemm": "DEEP_GEMM", "jit": "JIT"}
# What a plan says for people, or what a step reads in the matrix itself.
_NOT_OF_THE_RECIPE: Final = ("JIT_LIBRARIES", "MACHINE", "TE_VERSION")


class ImagePlan(Frozen):
    """An image that is to be built.

    Attributes:
        base: row of images.toml; "own" where the caller named one.
        reference: of the base, by its own registry's name: "repository:tag@sha256:...".
        pulled: the same, or the mirror that replaces the registry.
        verified: day on which a registry gave that digest; empty where none has, because of `unverified`.
        lock_hash: SHA-256 of the lock's bytes.
        sources: rows of images.toml that are built from a commit.
        arguments, labels: of the Dockerfile, and of the image.
    """

    target: str
    arch: str
    platform: str
    base: str
    reference: str
    pulled: str
    verified: str
    unverified: str
    lock: str
    lock_hash: str
    steps: tuple[str, ...]
    sources: tuple[str, ...]
    cache_arch: str
    arguments: dict[str, str] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)


class BuildSettings(Frozen):
    """What a host lends to a build; none of it becomes part of an image.

    Attributes:
        apt_sources: file in the form of sources.list.
        ca_bundle: certificates that are trusted while packages are fetched.
        pip_conf: text of a configuration file of pip, which may hold passwords.
        network: "host", or empty for the engine's own.
        jobs: compilers at a time.
        sources: row of images.toml -> a clone in place of its repository.
    """

    wheels: Path | None = None
    apt_sources: Path | None = None
    ca_bundle: Path | None = None
    pip_conf: str = ""
    network: str = ""
    jobs: str = ""
    sources: dict[str, Path] = Field(default_factory=dict)


@dataclass(frozen=True)
class ImageRows:
    """What is read of a checkout before anything is planned; `matrix` is another folder of rows."""

    matrix: Path | None
    tool: str
    variables: Mapping[str, str]

    @cached_property
    def catalog(self) -> Catalog:
        """The matrix."""
        return read_catalog(self.matrix)

    @cached_property
    def images(self) -> Images:
        """The rows of images.toml."""
        return read_all_images(self.catalog, self.matrix)

    @cached_property
    def pins(self) -> Pins:
        """The digests of bases."""
        return read_pins(self.root / PINS_FILE)

    @property
    def root(self) -> Path:
        """Of the checkout."""
        return (self.matrix or matrix_folder()).absolute().parent

    def plan(self, target: str, own_base: str = "", revision: str = "") -> ImagePlan:
        """What would be built for a target; raises ImageRefused."""
        rows, mirror = [row for row in self.catalog.targets if row.id == target], self.variables.get(MIRROR, "")
        how = {"own_base": own_base, "mirror": mirror, "revision": revision}
        return plan_images(self.images, self.pins, rows, root=self.root, **how)[0]

    def judge(self, image: Image, lock: ImageLock | None, own_base: str = "") -> StackFit:
        """Whether the stack of an image fits: with a lock, or by what its row pins."""
        stack = stack_of_image(self.images, image, lock, own_base)
        return judge_stacks(self.catalog, self.matrix, self.images, [stack])[0]

    def render_bake(self) -> str:
        """The bake file of every image: pinned bases by their own names, whatever this host has set, and no commit.

        Raises:
            ImageRefused: as `plan_images`.
        """
        known = {image.target for image in self.images.image}
        targets = [row for row in self.catalog.targets if row.id in known]
        plans = plan_images(self.images, read_pins(self.root / PINS_FILE), targets, root=self.root)
        return json.dumps(plan_bake(plans), indent=2, sort_keys=True) + "\n"


def find_images(images: Images, names: Iterable[str]) -> tuple[Image, ...]:
    """The rows of targets, in the order of the file; all of them where none is named.

    Raises:
        ImageRefused: a target has no image.
    """
    wanted, known = list(names), {image.target: image for image in images.image}
    if unknown := [name for name in wanted if name not in known]:
        raise ImageRefused(
            f"there is no image for {', '.join(unknown)}. Next step: choose one of {', '.join(known)}, or add a row to "
            "matrix/images.toml."
        )
    return tuple(image for image in images.image if not wanted or image.target in wanted)


def plan_images(
    images: Images, pins: Pins, targets: Iterable[Target], *, root: Path, own_base: str = "", mirror: str = "",
    revision: str = "",
) -> tuple[ImagePlan, ...]:  # fmt: skip
    """What would be built for each target.

    Args:
        targets: rows of targets.toml to build for.
        root: of the checkout, with locks and pyproject.toml.
        own_base: "REPOSITORY@sha256:..." in place of the pinned base; for one target.
        mirror: registry that replaces every other; empty for none.
        revision: commit of the project, for the labels.

    Raises:
        ImageRefused: a target without an image, a base without a digest, a lock that is missing, damaged or older than
            the matrix.
    """
    rows = {target.id: target for target in targets}
    chosen = find_images(images, rows) if rows else ()
    if own_base and len(chosen) != 1:
        raise ImageRefused(
            f"one base was given for {len(chosen)} images. Next step: name the one target that it is for."
        )
    project, plans = read_project(root), []
    for image in chosen:
        lock = read_image_lock(root / image.lock)
        check_lock(lock, gather_inputs(images, image, project), root / image.lock)
        start = _start_from(own_base) if own_base else _find_pinned(images, image, pins, mirror)
        labels = {f"{_OCI}.revision": revision, PINS_LABEL: pins.hash}
        plans.append(_plan(images, image, rows[image.target], lock, start, labels))
    return tuple(plans)


def require_base(reference: str) -> str:
    """A base that the caller names.

    Raises:
        ImageRefused: it is not pinned by a digest.
    """
    if not _OWN.match(reference):
        raise ImageRefused(
            f"the base {reference!r} is not pinned by a digest. Likely cause: a tag was given, whose content may "
            "change. Next step: write REPOSITORY@sha256:DIGEST; `docker buildx imagetools inspect` shows it."
        )
    return reference


def _start_from(reference: str) -> dict[str, str]:
    why = "named by the caller, and not one of the matrix"
    return {
        "base": "own", "reference": require_base(reference), "pulled": reference, "verified": "", "unverified": why
    }  # fmt: skip


def _find_pinned(images: Images, image: Image, pins: Pins, mirror: str) -> dict[str, str]:
    base = images.find_base(image.base)
    pin, name = pins.find(base.id), f"{base.repository}:{base.tag}"
    digest = pin.digest_for(image.platform) if pin else ""
    if not pin or not digest or (pin.repository, pin.tag) != (base.repository, base.tag):
        raise ImageRefused(
            f"the base {base.id} of {image.target} ({name}) has no digest for {image.platform}: containers/pins.json "
            f"has {f'{pin.repository}:{pin.tag}' if pin else 'nothing'}. Next step: `nox -s lock -- --only pins` where "
            f"its registry, or a mirror of it ({MIRROR}), can be reached; or `--base REPOSITORY@sha256:DIGEST`."
        )
    if words := refuse_unclaimed(images, base, pin):
        raise ImageRefused(words)
    pulled = f"{use_mirror(base.repository, mirror)}:{base.tag}@{digest}"
    why = "" if pin.verified else pin.how
    return {
        "base": base.id, "reference": f"{name}@{digest}", "pulled": pulled, "verified": pin.verified, "unverified": why
    }  # fmt: skip


def _plan(
    images: Images, image: Image, target: Target, lock: ImageLock, start: Mapping[str, str], labels: Mapping[str, str]
) -> ImagePlan:
    base = images.find_base(image.base)
    name, _, digest = start["reference"].partition("@")
    arguments = {
        "BASE_IMAGE": start["pulled"],
        "TARGET": image.target,
        "ARCH": target.arch,
        "MACHINE": MACHINES[image.platform],
        "CACHE_ARCH": image.cache_arch,
        "JIT_LIBRARIES": " ".join(image.jit),
        "PYTHON_VERSION": base.python,
        "SYSTEM_SITE_PACKAGES": "1" if base.provides else "0",
        "LOCK": image.lock,
        "LOCK_HASH": lock.hash,
        "TE_VERSION": image.te,
        "TE_ARCHS": image.te_archs,
        "LINKS": " ".join(image.links),
        "REMOVES": " ".join(row.name for row in image.removes),
        "USER_ID": str(image.user),
        "DRIVER_LEAST": base.driver_least,
    }
    for row in images.compiled:
        if row.name in image.pinned:
            arguments[f"{_as_argument(row.name)}_VARIABLES"] = _join(row.variables)
    for source in map(images.find_source, image.sources):
        for key in ("repository", "commit", "subdirectory"):
            arguments[f"{_as_argument(source.id)}_{key.upper()}"] = getattr(source, key)
        arguments[f"{_as_argument(source.id)}_VARIABLES"] = _join(source.variables)
    labels = {
        **labels,
        f"{_OCI}.title": f"megacpp-validate {image.target}",
        f"{_OCI}.version": __version__,
        f"{_OCI}.licenses": "Apache-2.0",
        f"{_OCI}.base.name": name,
        BASE_LABEL: digest,
        TARGET_LABEL: image.target,
        ARCH_LABEL: image.cache_arch,
        LOCK_LABEL: lock.hash,
    }
    return ImagePlan(
        **start, target=image.target, arch=target.arch, platform=image.platform, lock=image.lock, lock_hash=lock.hash,
        steps=tuple(image.steps), sources=tuple(image.sources), cache_arch=image.cache_arch, arguments=arguments,
        labels=labels,
    )  # fmt: skip


def _as_argument(name: str) -> str:
    return name.upper().replace("-", "_")


def _join(variables: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(variables.items()))


def name_image(target: str, registry: str = "", tag: str = "") -> str:
    """Repository and tag of an image: "127.0.0.1:5000/megacpp/cpu:0.1.0"."""
    return f"{registry.rstrip('/')}{'/' if registry else ''}megacpp/{target}:{tag or __version__}"


def plan_bake(plans: Iterable[ImagePlan], settings: BuildSettings | None = None) -> dict[str, Any]:
    """What `docker buildx bake` reads, as JSON.

    Args:
        settings: what this host lends; None for the file that is committed, which is the same on every host.
    """
    targets = {plan.target: _describe_target(plan, settings) for plan in plans}
    default = [name for name in targets if name == "cpu"] or list(targets)
    note = (
        "Generated by `nox -s lock` from matrix/images.toml, containers/locks and "
        "containers/pins.json; not to be edited"
    )
    groups = {"default": {"targets": default}, "all": {"targets": list(targets)}}
    return {"//": note, "group": groups, "target": targets}


def _describe_target(plan: ImagePlan, settings: BuildSettings | None) -> dict[str, Any]:
    # The plan's own arguments, less what the named contexts say, and with the stages that its steps need.
    kept = {
        key: value
        for key, value in plan.arguments.items()
        if not key.endswith(("_REPOSITORY", "_COMMIT")) and key not in _NOT_OF_THE_RECIPE
    }
    stages = {argument: f"{step.replace('_', '-')}-build" for step, argument in _STAGES.items() if step in plan.steps}
    target: dict[str, Any] = {
        "context": ".",
        "dockerfile": DOCKERFILE,
        "target": "image",
        "platforms": [plan.platform],
        "args": {**kept, **stages, "ARCH": plan.arch, "IMAGE_NAME": plan.labels[f"{_OCI}.title"]},
        "labels": {key: value for key, value in plan.labels.items() if value},
        "tags": [name_image(plan.target)],
        "attest": ["type=provenance,mode=max"],
    }
    contexts = {f"{source}-source": _address(plan, source) for source in plan.sources}
    if settings is not None:
        contexts |= {f"{one}-source": str(clone) for one, clone in settings.sources.items() if one in plan.sources}
        contexts |= {"wheels": str(settings.wheels)} if settings.wheels else {}
        target |= {"network": settings.network} if settings.network else {}
        target["args"] |= {"JOBS": settings.jobs} if settings.jobs else {}
    return target | ({"contexts": contexts} if contexts else {})


def _address(plan: ImagePlan, source: str) -> str:
    """A repository at a commit, as BuildKit fetches it; its submodules are at the commits that it names."""
    name = _as_argument(source)
    return f"{plan.arguments[f'{name}_REPOSITORY'].removesuffix('.git')}.git#{plan.arguments[f'{name}_COMMIT']}"
