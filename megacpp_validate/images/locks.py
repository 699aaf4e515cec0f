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
    """

    hash: str
    inputs: str
    packages: Mapping[str, LockedPackage]


def read_image_lock(file: Path) -> ImageLock:
    """A lock.

    Raises:
        ImageRefused: it is not there, cannot be read, or a line of it is no package with hashes.
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
        ImageRefused: a line of it is no package with hashes.
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
    inputs = _INPUTS.search(text)
    return ImageLock(sha256(text.encode()).hexdigest(), inputs[1] if inputs else "", packages)


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
