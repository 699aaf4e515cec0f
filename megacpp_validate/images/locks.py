"""Locks of images: what a lock is made from, what it holds, and whether somebody edited it.

The second line of a lock is the hash of its inputs, the third the hash of what is below. pip and uv read it as it is.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ..catalog.images import MACHINES, Image, Images
from .tools import ImageRefused

STEP: Final = "Next step: `nox -s lock` rewrites it; review the difference and commit it."
EDITED: Final = "was edited by hand: its text does not hash to its `# content:`"

_CONTENT: Final = "# content: sha256:"
_INPUTS: Final = re.compile(r"^# inputs: sha256:([0-9a-f]{64})$", re.MULTILINE)
_PACKAGE: Final = re.compile(r"([A-Za-z0-9][\w.-]*)==([^\s;]+)((?:\s+--hash=sha256:[0-9a-f]{64})*)( *;.*)?")


@dataclass(frozen=True)
class LockedPackage:
    """A package in one version, and the SHA-256 of each file that it may come from."""

    version: str
    hashes: frozenset[str]


@dataclass(frozen=True)
class ImageLock:
    """A lock.

    Attributes:
        hash: SHA-256 of its bytes.
        inputs: hash of what it was made from, as its second line has it.
        packages: name -> what is locked.
    """

    hash: str
    inputs: str
    packages: Mapping[str, LockedPackage]


@dataclass(frozen=True)
class LockInputs:
    """What a lock follows from.

    Attributes:
        platform: as uv names it ("x86_64-manylinux_2_39").
        provided: distribution of the base -> version, empty where unknown; without those that the lock replaces.
        over: distribution -> version of the base that the lock's version shadows.
        removed: distribution -> version of the base that the image removes.
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


def read_project(root: Path) -> dict[str, Any]:
    """`pyproject.toml` of a checkout.

    Raises:
        ImageRefused: it is missing, or cannot be read.
    """
    try:
        return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
        raise ImageRefused(
            f"{root / 'pyproject.toml'} cannot be read: {fault}. Next step: run it in a checkout of the project."
        ) from fault


def gather_inputs(images: Images, image: Image, project: Mapping[str, Any]) -> LockInputs:
    """What the lock of an image follows from.

    Raises:
        ImageRefused: the image names a dependency group that pyproject.toml has not.
    """
    base = images.find_base(image.base)
    wanted = [*project["project"]["dependencies"], *images.everywhere, *image.requirements]
    for group in image.groups:
        wanted += _read_group(project, group, image.target)
    lifted, removed = {row.name for row in image.over}, {row.name for row in image.removes}
    rows = base.distributions
    return LockInputs(
        target=image.target,
        base=base.id,
        python=base.python,
        platform=f"{MACHINES[image.platform]}-manylinux_{base.glibc.replace('.', '_')}",
        requirements=tuple(sorted(_join_same(wanted))),
        provided={name: version for name, version in rows.items() if name not in lifted | removed},
        over={name: version for name, version in rows.items() if name in lifted},
        removed={name: version for name, version in rows.items() if name in removed},
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
            f"pyproject.toml has no dependency group {group!r}. Next step: name one of {', '.join(groups)} in the row "
            f"{target} of matrix/images.toml."
        )
    found: list[str] = []
    for row in groups[group]:
        found += [row] if isinstance(row, str) else _read_group(project, row["include-group"], target)
    return found


def _join_same(wanted: Iterable[str]) -> set[str]:
    """Each requirement once; one for a local build ("2.13.0+cpu") takes the place of the public one."""
    named = {text: canonicalize_name(Requirement(text).name) for text in wanted}
    local = {name for text, name in named.items() if "+" in text}
    return {text for text, name in named.items() if "+" in text or name not in local}


def read_image_lock(file: Path) -> ImageLock:
    """A lock of an image.

    Raises:
        ImageRefused: it is missing, a line of it is no package with hashes, or it was edited by hand.
    """
    try:
        text = file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as fault:
        raise ImageRefused(f"the lock {file} cannot be read: {fault}. {STEP}") from fault
    return parse_lock(text, file)


def parse_lock(text: str, file: Path) -> ImageLock:
    """A lock of an image out of its text; `file` is for messages. Raises as `read_image_lock`."""
    rows = list(list_packages(text))
    packages = dict(rows)
    bare = [name for name, package in rows if not package.hashes]
    if not is_sealed(text) or bare or len(packages) < len(rows):
        why = f": {bare[0][:60]!r} is not pinned to one version with hashes" if bare else ""
        raise ImageRefused(f"the lock {file} {EDITED}{why}. {STEP}")
    return ImageLock(sha256(text.encode()).hexdigest(), read_inputs(text), packages)


def list_packages(text: str) -> Iterator[tuple[str, LockedPackage]]:
    """Name and package of each line of a lock; another line is its own name, in no version."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            found = _PACKAGE.fullmatch(line.strip())
            hashes = found[3].replace("--hash=sha256:", "").split() if found else []
            name, version = (str(canonicalize_name(found[1])), found[2]) if found else (line, "")
            yield name, LockedPackage(version, frozenset(hashes))


def read_inputs(text: str) -> str:
    """The hash of what a lock was made from, as its second line has it; empty where it has none."""
    found = _INPUTS.search(text)
    return found[1] if found else ""


def seal_lock(text: str) -> str:
    """The text with its third line: the hash of what is below."""
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(_CONTENT)]
    head, rest = "".join(lines[:2]), "".join(lines[2:])
    return f"{head}{_CONTENT}{sha256(rest.encode()).hexdigest()}\n{rest}"


def is_sealed(text: str) -> bool:
    """Whether the text of a lock hashes to its third line."""
    return text == seal_lock(text)


def check_lock(lock: ImageLock, inputs: LockInputs, file: Path) -> None:
    """Refuse a lock that was made from something else than the matrix has now, or holds what the base provides.

    Raises:
        ImageRefused: with what is wrong.
    """
    why = ""
    if lock.inputs != inputs.hash:
        why = "is older than the matrix"
    elif doubled := sorted({*inputs.provided, *inputs.excluded} & set(lock.packages)):
        why = f"installs {', '.join(doubled)}, which the base {inputs.base} provides"
    if why:
        raise ImageRefused(f"the lock {file} {why}. {STEP}")
