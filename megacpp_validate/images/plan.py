"""From rows of the matrix and pins to what is built: nothing is fetched, and no engine is asked."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .. import __version__
from ..catalog.bridge import Target, matrix_folder
from ..catalog.images import MACHINES, Image, Images
from .claims import say_unclaimed
from .inputs import gather_inputs, read_project
from .labels import ARCH_LABEL, LOCK_LABEL, PINS_LABEL, TARGET_LABEL
from .locks import ImageLock, check_lock, read_image_lock
from .pins import Pins
from .plan_result import ImagePlan
from .refusals import ImageRefused

MIRROR: Final = "MEGACPP_REGISTRY_MIRROR"

_OWN: Final = re.compile(r"^[^\s@]+@sha256:[0-9a-f]{64}$")
_MIRROR: Final = re.compile(r"^[a-z0-9.-]+(:\d+)?(/[a-z0-9._-]+)*$")


@dataclass(frozen=True)
class _From:
    """What a build starts from."""

    base: str
    reference: str
    pulled: str
    verified: str
    unverified: str


def find_images(images: Images, names: Iterable[str]) -> tuple[Image, ...]:
    """The rows of targets, in the order of the file; all of them where none is named.

    Raises:
        ImageRefused: a target has no image.
    """
    asked = list(names)
    known = {image.target: image for image in images.image}
    if unknown := [name for name in asked if name not in known]:
        raise ImageRefused(
            f"there is no image for {', '.join(unknown)}. Next step: choose of {', '.join(known)}, or add a row to "
            "matrix/images.toml."
        )
    return tuple(image for image in images.image if not asked or image.target in asked)


def plan_images(
    images: Images,
    pins: Pins,
    targets: Iterable[Target],
    *,
    root: Path | None = None,
    own_base: str = "",
    mirror: str | None = None,
    revision: str = "",
    source: str = "",
) -> tuple[ImagePlan, ...]:
    """What would be built for each target.

    Args:
        images: the rows.
        pins: digests of the bases.
        targets: rows of targets.toml to build for.
        root: of the checkout: where locks and pyproject.toml lie.
        own_base: "REPOSITORY@sha256:..." instead of the pinned base; for one target.
        mirror: registry that stands in for every other; None asks the variable MEGACPP_REGISTRY_MIRROR.
        revision, source: commit and address of the project, for the labels.

    Raises:
        ImageRefused: a target without an image, a base without a digest, a lock that is missing, damaged or older than
            the matrix.
    """
    home = root or matrix_folder().parent
    stand_in = os.environ.get(MIRROR, "") if mirror is None else mirror
    rows = {target.id: target for target in targets}
    chosen = find_images(images, rows) if rows else ()
    if own_base and len(chosen) != 1:
        raise ImageRefused(
            f"one base was given for {len(chosen)} images. Next step: name the one target that it is for."
        )
    project = read_project(home)
    plans = []
    for image in chosen:
        lock = read_image_lock(home / image.lock)
        check_lock(lock, gather_inputs(images, image, project), home / image.lock)
        start = _own(own_base) if own_base else _pinned(images, image, pins, stand_in)
        told = {"revision": revision, "source": source, "pins": pins.hash}
        plans.append(_plan(images, image, rows[image.target], lock, start, told))
    return tuple(plans)


def show_through(repository: str, mirror: str) -> str:
    """A repository as the registry that stands in for its own has it: "HOST[:PORT][/PREFIX]/PATH".

    Raises:
        ImageRefused: the setting is no registry.
    """
    if not mirror:
        return repository
    if not _MIRROR.match(mirror.rstrip("/")):
        raise ImageRefused(
            f"{MIRROR}={mirror!r} is no registry. Next step: say host[:port][/prefix], without a scheme, as in "
            "registry.example:5000/mirror."
        )
    return f"{mirror.rstrip('/')}/{repository.partition('/')[2]}"


def _own(reference: str) -> _From:
    if not _OWN.match(reference):
        raise ImageRefused(
            f"the base {reference!r} is not pinned by a digest. Likely cause: a tag was given, which may be another "
            "image tomorrow. Next step: say REPOSITORY@sha256:DIGEST; `docker buildx imagetools inspect` shows it."
        )
    return _From("own", reference, reference, "", "named by the caller, and not one of the matrix")


def _pinned(images: Images, image: Image, pins: Pins, mirror: str) -> _From:
    base = images.find_base(image.base)
    pin = pins.find(base.id)
    digest = pin.digest_for(image.platform) if pin else ""
    if not pin or not digest or (pin.repository, pin.tag) != (base.repository, base.tag):
        seen = f"{pin.repository}:{pin.tag}" if pin else "nothing"
        raise ImageRefused(
            f"the base {base.id} of {image.target} ({base.repository}:{base.tag}) has no digest for {image.platform}: "
            f"containers/pins.json has {seen}. Next step: `nox -s lock -- --only pins` where its registry, or a mirror "
            f"of it ({MIRROR}), can be reached; or `--base REPOSITORY@sha256:DIGEST`."
        )
    if words := say_unclaimed(images, base, pin):
        raise ImageRefused(words)
    unverified = "" if pin.verified else pin.how
    return _From(
        base=base.id,
        reference=f"{base.repository}:{base.tag}@{digest}",
        pulled=f"{show_through(base.repository, mirror)}:{base.tag}@{digest}",
        verified=pin.verified,
        unverified=unverified,
    )


def _plan(
    images: Images, image: Image, target: Target, lock: ImageLock, start: _From, told: Mapping[str, str]
) -> ImagePlan:
    name, _, digest = start.reference.partition("@")
    return ImagePlan(
        target=image.target,
        arch=target.arch,
        platform=image.platform,
        base=start.base,
        reference=start.reference,
        pulled=start.pulled,
        verified=start.verified,
        unverified=start.unverified,
        lock=image.lock,
        lock_hash=lock.hash,
        steps=tuple(image.steps),
        sources=tuple(image.sources),
        cache_arch=image.cache_arch,
        arguments=_arguments(images, image, target, lock, start),
        labels={
            "org.opencontainers.image.title": f"megacpp-validate {image.target}",
            "org.opencontainers.image.version": __version__,
            "org.opencontainers.image.revision": told["revision"],
            "org.opencontainers.image.source": told["source"],
            "org.opencontainers.image.licenses": "Apache-2.0",
            "org.opencontainers.image.base.name": name,
            "org.opencontainers.image.base.digest": digest,
            TARGET_LABEL: image.target,
            ARCH_LABEL: image.cache_arch,
            LOCK_LABEL: lock.hash,
            PINS_LABEL: told["pins"],
        },
    )


def _arguments(images: Images, image: Image, target: Target, lock: ImageLock, start: _From) -> dict[str, str]:
    base = images.find_base(image.base)
    arguments = {
        "BASE_IMAGE": start.pulled,
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
        name = _as_argument(source.id)
        arguments[f"{name}_REPOSITORY"] = source.repository
        arguments[f"{name}_COMMIT"] = source.commit
        arguments[f"{name}_SUBDIRECTORY"] = source.subdirectory
        arguments[f"{name}_VARIABLES"] = _join(source.variables)
    return arguments


def _as_argument(name: str) -> str:
    return name.upper().replace("-", "_")


def _join(variables: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(variables.items()))
