"""From rows of the matrix, pins and locks to what is built, and to whether stacks fit; no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from .. import __version__
from ..catalog.bridge import Catalog
from ..catalog.images import Base, Image, Images, Needs, read_images, read_needs
from ..environments.fits import FitVerdict, Part, Stack, StackFit, judge_stack, require_known, stack_of_words
from ..environments.plan import choose_names
from ..errors import Exit, exit_for
from ..evidence.values import Frozen, Result
from . import tools
from .locks import ImageLock, gather_inputs, read_image_lock

DOCKERFILE: Final = "containers/Dockerfile"

_OCI: Final = "org.opencontainers.image"
_STAGES: Final = ("te", "flash_attention_3", "deep_gemm", "jit")  # steps that a stage of the recipe makes


class ImagePlan(Frozen):
    """An image that is to be built.

    Attributes:
        base: row of images.toml; "own" where no row has the digest that the caller named.
        reference: of the base, by its own registry's name: "repository:tag@sha256:...".
        pulled: the same, or the mirror that replaces the registry.
        verified: day on which a registry confirmed that digest; empty where none has.
        lock_hash: SHA-256 of the lock's bytes.
        sources: rows of images.toml that are built from a commit.
        contexts: the repository of each at its commit, as BuildKit fetches it; its submodules are at the commits that
            it names.
        arguments, labels: of the Dockerfile, and of the image.
    """

    target: str
    arch: str
    platform: str
    base: str
    reference: str
    pulled: str
    verified: str = ""
    lock: str
    lock_hash: str
    steps: tuple[str, ...]
    sources: tuple[str, ...]
    cache_arch: str
    contexts: dict[str, str] = Field(default_factory=dict)
    arguments: dict[str, str] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)


class FitResult(Result):
    """Whether several stacks fit."""

    stacks: tuple[StackFit, ...]

    @property
    def exit(self) -> Exit:
        """Closed where something does not fit, incomplete where something is unknown."""
        unknown = any(stack.of(FitVerdict.UNKNOWN) for stack in self.stacks)
        return exit_for(breaks=any(stack.refused for stack in self.stacks), lacks=unknown)


@dataclass(frozen=True)
class ImageRows:
    """The rows, pins and locks of a checkout.

    Attributes:
        te: release of Transformer Engine that images have instead of the pinned one.
    """

    catalog: Catalog
    variables: Mapping[str, str]
    te: str = ""

    @cached_property
    def images(self) -> Images:
        """The rows of images.toml, checked against the targets; with `te`, of images with that release.

        Raises:
            WrongArguments: no row says how that release is compiled.
        """
        images = read_images(self.catalog)
        if not self.te:
            return images
        if self.te not in {row.version for row in images.compiled}:
            choose_names("compiled release", replace(self, te="").locked, [self.te])
        return images.model_copy(update={"image": [row.with_release(self.te) for row in images.image]})

    @cached_property
    def locked(self) -> list[str]:
        """Releases, beside the pinned one, for which images have locks."""
        releases, images = [row.version for row in self.images.compiled], self.images.image
        others = ((te, one) for te in releases for one in images if te != one.te)
        return list(dict.fromkeys(te for te, one in others if (self.root / one.with_release(te).lock).is_file()))

    @cached_property
    def needs(self) -> Needs:
        """The rows of needs.toml."""
        return read_needs(self.catalog)

    @property
    def root(self) -> Path:
        """The folder of the checkout."""
        return self.catalog.folder.parent

    def plan(self, target: str, own_base: str = "", revision: str = "") -> ImagePlan:
        """What would be built for a target.

        Args:
            own_base: "REPOSITORY@sha256:..." in place of the pinned base.
            revision: commit of the project, for the labels.

        Raises:
            ImageRefused: a target without an image, a lock that is missing, edited or older than the matrix, or a base
                without a digest.
        """
        image = self.find([target])[0]
        base = self.images.find_base(image.base)
        lock = read_image_lock(self.root / image.lock, gather_inputs(self.images, image, self.root).hash)
        reference = own_base or f"{base.repository}:{base.tag}@{base.digest}"
        tools.split_reference(reference)  # the caller's may have no digest
        pulled = own_base or tools.use_mirror(reference, self.variables.get(tools.MIRROR, ""))
        arch = next(row.arch for row in self.catalog.targets if row.id == target)
        name, _, digest = reference.partition("@")
        labels = {
            f"{_OCI}.revision": revision,
            f"{_OCI}.title": f"megacpp-validate {target}",
            f"{_OCI}.version": __version__,
            f"{_OCI}.licenses": "Apache-2.0",
            f"{_OCI}.base.name": name,
            tools.BASE_LABEL: digest,
            tools.TARGET_LABEL: target,
            tools.LOCK_LABEL: lock.hash,
        }
        arguments = _list_arguments(self.images, image, arch, lock.hash) | {"BASE_IMAGE": pulled}
        row = self.find_base(image, own_base)
        contexts = {
            f"{source.id}-source": f"{source.repository.removesuffix('.git')}.git#{source.commit}"
            for source in map(self.images.find_source, image.sources)
        }
        return ImagePlan(
            base=row.id if row else "own", verified=row.verified if row else "", reference=reference, pulled=pulled,
            target=target, arch=arch, platform=image.platform, lock=image.lock, lock_hash=lock.hash,
            steps=tuple(image.steps), sources=tuple(image.sources), cache_arch=image.cache_arch, contexts=contexts,
            arguments=arguments, labels=labels,
        )  # fmt: skip

    def find(self, names: Iterable[str]) -> tuple[Image, ...]:
        """The rows of targets, in the order of the file; all of them where none is named.

        Raises:
            WrongArguments: a target has no image.
        """
        chosen = choose_names("image for", [image.target for image in self.images.image], tuple(names))
        return tuple(image for image in self.images.image if image.target in chosen)

    def find_base(self, image: Image, own_base: str = "") -> Base | None:
        """The row of the base that an image is built on, which a digest names; None for contents that are unknown."""
        digest = own_base.partition("@")[2] or self.images.find_base(image.base).digest
        return next((base for base in self.images.base if base.digest == digest), None)

    def judge(self, image: Image, lock: ImageLock, own_base: str = "") -> StackFit:
        """Whether the stack of an image fits."""
        base = self.find_base(image, own_base)
        stack = stack_of_image(self.images, image, lock, base)
        on_base = image.model_copy(update={"base": base.id}) if base else image
        return self.judge_stack(replace(stack, asks=gather_inputs(self.images, on_base, self.root).asks))

    def judge_stack(self, stack: Stack) -> StackFit:
        """Whether a stack fits, by all rows of the matrix."""
        return judge_stack(stack, self.needs, self.images.range, [row.te for row in self.catalog.stacks])


def _list_arguments(images: Images, image: Image, arch: str, lock_hash: str) -> dict[str, str]:
    """Arguments of the Dockerfile, without that of the base."""
    base = images.find_base(image.base)
    arguments = {
        "TARGET": image.target,
        "ARCH": arch,
        "CACHE_ARCH": image.cache_arch,
        "PYTHON_VERSION": base.python,
        "SYSTEM_SITE_PACKAGES": "1" if base.provides else "0",
        "LOCK": image.lock,
        "LOCK_HASH": lock_hash,
        "TE_VERSION": image.te,
        "TE_ARCHS": image.te_archs,
        "LINKS": " ".join(image.links),
        "REMOVES": " ".join(row.name for row in image.removes),
        "USER_ID": str(image.user),
    }
    for row in images.compiled:
        if image.pinned.get(row.name) == row.version:
            arguments[f"{_as_argument(row.name)}_VARIABLES"] = _join(row.variables)
    for source in map(images.find_source, image.sources):
        arguments[f"{_as_argument(source.id)}_SUBDIRECTORY"] = source.subdirectory
        arguments[f"{_as_argument(source.id)}_VARIABLES"] = _join(source.variables)
    return arguments


def _as_argument(name: str) -> str:
    return name.upper().replace("-", "_")


def _join(variables: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(variables.items()))


def name_image(target: str, registry: str, tag: str) -> str:
    """Repository and tag of an image: "127.0.0.1:5000/megacpp/cpu:0.1.0"."""
    return f"{registry.rstrip('/')}{'/' if registry else ''}megacpp/{target}:{tag}"


def describe_target(plan: ImagePlan) -> dict[str, Any]:
    """A target of what `docker buildx bake` reads, as JSON; the same on every host."""
    recipe = {key: value for key, value in plan.arguments.items() if key != "TE_VERSION"}  # which is for people
    stages = {step.upper(): f"{step.replace('_', '-')}-build" for step in _STAGES if step in plan.steps}
    target: dict[str, Any] = {
        "context": ".",
        "dockerfile": DOCKERFILE,
        "target": "image",
        "platforms": [plan.platform],
        "args": {**recipe, **stages, "IMAGE_NAME": plan.labels[f"{_OCI}.title"]},
        "labels": {key: value for key, value in plan.labels.items() if value},
        "attest": ["type=provenance,mode=max"],
    }
    return target | ({"contexts": plan.contexts} if plan.contexts else {})


# --- does a stack fit? ------------------------------------------------------------------------------------------------


def run_fits(rows: ImageRows, te: str | None, parts: Iterable[str], target: str) -> FitResult:
    """Judge a stack that is given in words; without a release, the stack of every image.

    Raises:
        ImageRefused: a word, a target or a lock is wrong.
    """
    choose_names("target", [row.id for row in rows.catalog.targets], [target] if target else [])
    if te is not None:  # an empty one, of a variable without a value, is no question about the images
        stack = require_known(stack_of_words(te, parts, rows.needs, target), rows.needs, rows.images.range)
        found = [rows.judge_stack(stack)]
    else:
        chosen = [image for image in rows.images.image if image.te and target in ("", image.target)]
        found = [rows.judge(image, read_image_lock(rows.root / image.lock)) for image in chosen]
    return FitResult(stacks=tuple(found))


def stack_of_image(images: Images, image: Image, lock: ImageLock, base: Base | None) -> Stack:
    """The stack of an image: its base, less what is removed, and its lock; of no base the contents are unknown."""
    rows, removed = list[tuple[str, str, str]](), {row.name for row in image.removes}
    if base:
        by, least = f"base {base.id}", base.driver_least
        rows = [("driver", least, f"{by}, the least that runs it")] if least else []
        parts = {"python": base.python, **base.provided}
        rows += [(name, version, by) for name, version in parts.items() if name not in removed]
    rows += [(name, one.version, f"lock {image.lock}") for name, one in lock.packages.items()]
    found = {name: Part(name=name, version=version, brought_by=by) for name, version, by in rows}
    sources = tuple(map(images.find_source, image.sources))
    return Stack(image.target, image.te, found, image.target, sources)
