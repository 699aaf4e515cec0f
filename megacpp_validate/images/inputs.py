"""What a lock is made from: everything of the matrix and of pyproject.toml that it follows from, and its hash."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ..catalog.images import MACHINES, Image, Images
from .refusals import ImageRefused

_PROJECT: Final = "pyproject.toml"


@dataclass(frozen=True)
class LockInputs:
    """What a lock follows from.

    Attributes:
        target: row of targets.toml.
        base: row of images.toml.
        python: minor version ("3.12").
        platform: as uv names it ("x86_64-manylinux_2_39").
        requirements: what is asked for, sorted.
        provided: distribution of the base -> its version, empty where that is not known; those that the lock holds in
            another version are not among them.
        over: distribution -> version of the base, over which the lock's lies.
        removed: distribution -> version of the base, which is taken out of it.
        excluded: distributions whose files the base brings in another way.
        compiled: "name==version" of what is locked as its source release -> what it requires.
    """

    target: str
    base: str
    python: str
    platform: str
    requirements: tuple[str, ...]
    provided: Mapping[str, str]
    over: Mapping[str, str]
    removed: Mapping[str, str]
    excluded: tuple[str, ...]
    compiled: Mapping[str, tuple[str, ...]]

    @property
    def hash(self) -> str:
        """SHA-256 of all of it."""
        return sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def forbidden(self) -> frozenset[str]:
        """Distributions that the lock must not hold."""
        return frozenset({*self.provided, *self.excluded})


def read_project(root: Path) -> dict[str, Any]:
    """`pyproject.toml` of a checkout.

    Raises:
        ImageRefused: there is none, or it cannot be read.
    """
    try:
        return tomllib.loads((root / _PROJECT).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
        raise ImageRefused(
            f"{root / _PROJECT} cannot be read: {fault}. Likely cause: this is an installed package, and images are "
            "made from a checkout. Next step: run it in a checkout of the project."
        ) from fault


def gather_inputs(images: Images, image: Image, project: Mapping[str, Any]) -> LockInputs:
    """What the lock of an image follows from.

    Raises:
        ImageRefused: the image names a dependency group that pyproject.toml has not.
    """
    base = images.find_base(image.base)
    asked = [*project["project"]["dependencies"], *images.everywhere]
    for group in image.groups:
        asked += _read_group(project, group, image.target)
    asked += image.requirements
    lifted = {row.name for row in image.over}
    removed = {row.name for row in image.removes}
    provided = {name: version for name, version in base.distributions.items() if name not in lifted | removed}
    return LockInputs(
        target=image.target,
        base=base.id,
        python=base.python,
        platform=f"{MACHINES[image.platform]}-manylinux_{base.glibc.replace('.', '_')}",
        requirements=tuple(sorted(_join_same(asked))),
        provided=provided,
        over={name: version for name, version in base.distributions.items() if name in lifted},
        removed={name: version for name, version in base.distributions.items() if name in removed},
        excluded=tuple(sorted(base.stands_for)),
        compiled={
            f"{row.name}=={row.version}": tuple(row.requires)
            for row in images.compiled
            if image.pinned.get(row.name) == row.version
        },
    )


def _read_group(project: Mapping[str, Any], group: str, target: str) -> list[str]:
    groups = project.get("dependency-groups", {})
    if group not in groups:
        raise ImageRefused(
            f"the image {target} has the dependency group {group!r}, which {_PROJECT} has not. Next step: name one of "
            f"{', '.join(groups)} in matrix/images.toml, or add it."
        )
    found: list[str] = []
    for row in groups[group]:
        found += [row] if isinstance(row, str) else _read_group(project, row["include-group"], target)
    return found


def _join_same(asked: Iterable[str]) -> list[str]:
    """Each requirement once; one for a local build ("2.13.0+cpu") takes the place of the public one."""
    named = {text: canonicalize_name(Requirement(text).name) for text in asked}
    local = {name for text, name in named.items() if "+" in text}
    return [text for text, name in named.items() if "+" in text or name not in local]
