"""Locks of images as typed values: what they hold, and whether that is what the matrix says.

A lock is the file that `nox -s lock` writes: comments first, of which the second says what it was made from, then a
package a line with the hashes of the files that it may come from. pip and uv read it as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name

from .inputs import LockInputs
from .refusals import ImageRefused

STEP: Final = "Next step: `nox -s lock` writes it anew; look at what it changes, and commit it."

EDITED: Final = "was edited by hand: what is in it does not hash to its `# content:`"

_CONTENT: Final = "# content: sha256:"
_INPUTS: Final = re.compile(r"^# inputs: sha256:([0-9a-f]{64})$", re.MULTILINE)
_PACKAGE: Final = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)((?:\s+--hash=sha256:[0-9a-f]{64})+)$")
_HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})")


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
        inputs: hash of what it was made from, as it says itself; empty where it does not.
        packages: name -> what is locked.
        sealed: whether it says what its own content hashes to, and that is so.
    """

    hash: str
    inputs: str
    packages: Mapping[str, LockedPackage]
    sealed: bool = False


def read_image_lock(file: Path) -> ImageLock:
    """A lock.

    Raises:
        ImageRefused: it is not there, cannot be read, a line of it is no package with hashes, or it was edited.
    """
    try:
        text = file.read_bytes().decode()
    except FileNotFoundError as fault:
        raise ImageRefused(f"there is no lock {file}. {STEP}") from fault
    except (OSError, UnicodeDecodeError) as fault:
        raise ImageRefused(f"the lock {file} cannot be read: {fault}. {STEP}") from fault
    return parse_lock(text, file)


def parse_lock(text: str, file: Path) -> ImageLock:
    """A lock out of its text; `file` is for the words.

    Raises:
        ImageRefused: a line of it is no package with hashes, or it was edited since it was sealed.
    """
    packages: dict[str, LockedPackage] = {}
    for number, line in _join_lines(text):
        found = _PACKAGE.match(line)
        name = canonicalize_name(found[1]) if found else ""
        if not found or name in packages:
            words = "is there twice" if found else "is no package in one version with hashes"
            raise ImageRefused(
                f"{file}, line {number}: {line[:60]!r} {words}. Likely cause: it was edited by hand. {STEP}"
            )
        packages[name] = LockedPackage(found[2], frozenset(_HASH.findall(found[3])))
    inputs, sealed = _INPUTS.search(text), is_sealed(text)
    if sealed is False:
        raise ImageRefused(f"the lock {file} {EDITED}. {STEP}")
    return ImageLock(sha256(text.encode()).hexdigest(), inputs[1] if inputs else "", packages, sealed is True)


def seal_lock(text: str) -> str:
    """The text with its third line: the hash of what is below it, by which an edit of a version or a hash is seen."""
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(_CONTENT)]
    head, rest = "".join(lines[:2]), "".join(lines[2:])
    return f"{head}{_CONTENT}{sha256(rest.encode()).hexdigest()}\n{rest}"


def is_sealed(text: str) -> bool | None:
    """Whether the text of a lock is what it was sealed with; None where it never was."""
    return text == seal_lock(text) if f"\n{_CONTENT}" in text else None


def check_lock(lock: ImageLock, inputs: LockInputs, file: Path) -> None:
    """Refuse a lock that was made from something else than the matrix says now, or that holds what the base provides.

    Raises:
        ImageRefused: with what is wrong.
    """
    if lock.inputs != inputs.hash:
        raise ImageRefused(
            f"the lock {file} is older than the matrix: it says inputs {lock.inputs[:12] or '(none)'}, and "
            f"matrix/images.toml with pyproject.toml now give {inputs.hash[:12]}. {STEP}"
        )
    if not lock.sealed:
        raise ImageRefused(
            f"the lock {file} does not say what it hashes to. Likely cause: it was edited by hand, or made by an "
            f"earlier release of this tool. {STEP}"
        )
    if doubled := sorted(inputs.forbidden & set(lock.packages)):
        raise ImageRefused(
            f"the lock {file} installs {', '.join(doubled)}, which the base {inputs.base} provides. Likely cause: it "
            f"was edited by hand. {STEP}"
        )


def _join_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with those that they are continued on, each with its number; no comments."""
    begun, parts = 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if not parts and (not bare or bare.startswith("#")):
            continue
        begun = begun if parts else number
        parts.append(bare.removesuffix("\\").strip())
        if not bare.endswith("\\"):
            yield begun, " ".join(part for part in parts if part)
            parts = []
    if parts:
        yield begun, " ".join(parts)
