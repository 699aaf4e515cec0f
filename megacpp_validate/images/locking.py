"""The one writer of pins and locks: everything is made first, held against what is there, and then written at once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from packaging.utils import canonicalize_name

from ..catalog.images import Image, Images
from .inputs import gather_inputs
from .lock_compile import compile_lock, compile_releases, compile_sessions
from .lock_result import LockLine, PackageLine
from .locks import EDITED, ImageLock, check_lock, is_sealed, parse_lock, read_image_lock, seal_lock
from .refusals import ImageRefused

_PIN: Final = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)", re.MULTILINE)
_HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})")
SESSIONS: Final = "sessions"
RELEASES: Final = "releases"


@dataclass(frozen=True)
class Written:
    """A file that is to be there."""

    file: str
    text: str


@dataclass(frozen=True)
class Locked:
    """A lock, made: its line, its text, and what it holds; None where it has no hashes, as that of nox sessions has.

    Attributes:
        refusal: why it must not be written; empty where it may.
    """

    line: LockLine
    text: str
    lock: ImageLock | None
    refusal: str = ""


@dataclass(frozen=True)
class Asker:
    """What a lock is made with.

    Attributes:
        root: of the checkout.
        project: its pyproject.toml.
        variables: of the environment, with the user's index.
        releases: of Transformer Engine, that stacks.toml has.
        upgrade: distributions that are not kept in their version; "*" for all.
    """

    root: Path
    project: Mapping[str, Any]
    variables: Mapping[str, str]
    releases: tuple[str, ...]
    upgrade: tuple[str, ...] = ()


def make_image_lock(images: Images, image: Image, asker: Asker) -> Locked:
    """The lock of an image as it would be now.

    Raises:
        NoEnvironment: uv is not there, or finds no solution.
        ImageRefused: what uv made holds what the base provides.
    """
    inputs = gather_inputs(images, image, asker.project)
    before = _read_text(asker.root / image.lock)
    text = seal_lock(compile_lock(inputs, before, asker.variables, links=image.links, upgrade=asker.upgrade))
    lock = parse_lock(text, asker.root / image.lock)
    check_lock(lock, inputs, asker.root / image.lock)
    stale = _say_stale(before, text, inputs.hash)
    packages = compare_packages(_packages(before), _packages(text))
    return Locked(
        LockLine(target=image.target, file=image.lock, stale=stale, count=len(lock.packages), packages=packages),
        text,
        lock,
        _refuse_lost_files(image.lock, before, text, asker.upgrade),
    )


def make_sessions_lock(images: Images, asker: Asker) -> Locked:
    """The constraints of nox sessions as they would be now.

    Raises:
        NoEnvironment: uv is not there, or finds no solution.
    """
    sessions = images.sessions
    before = _read_text(asker.root / sessions.lock)
    hashed = hash_sessions(images, asker.project)
    text = seal_lock(compile_sessions(asker.root, sessions, hashed, before, asker.variables, upgrade=asker.upgrade))
    found = _packages(text)
    line = LockLine(
        target=SESSIONS,
        file=sessions.lock,
        stale=_say_stale(before, text, hashed),
        count=len(found),
        packages=compare_packages(_packages(before), found),
    )
    return Locked(line, text, None)


def make_releases_lock(images: Images, asker: Asker) -> Locked:
    """The wheels of all releases as they would be locked now.

    Raises:
        NoEnvironment: uv is not there, or the index lacks one.
        ImageRefused: the index has one, and no hash of it.
    """
    rows = images.releases
    before = _read_text(asker.root / rows.lock)
    hashed = hash_releases(images, asker.releases)
    text = seal_lock(compile_releases(rows.distribution, asker.releases, hashed, asker.variables))
    found = _packages(text).get(rows.distribution, ("", frozenset()))
    if missing := sorted(set(asker.releases) - set(found[0].split(", "))):
        raise ImageRefused(
            f"the index gives no hash for {rows.distribution} {', '.join(missing)}. Likely cause: it has no wheel of "
            "it. Next step: take it out of matrix/stacks.toml, or name an index that has it with UV_DEFAULT_INDEX."
        )
    line = LockLine(
        target=RELEASES,
        file=rows.lock,
        stale=_say_stale(before, text, hashed),
        count=len(asker.releases),
        packages=compare_packages(_packages(before), _packages(text)),
    )
    return Locked(line, text, None, _refuse_lost_files(rows.lock, before, text, asker.upgrade))


def hash_releases(images: Images, releases: Iterable[str]) -> str:
    """What the lock of releases follows from, as a hash."""
    return sha256(repr([images.releases.distribution, *releases]).encode()).hexdigest()


def check_locks(images: Images, asker: Asker, chosen: Sequence[Image]) -> tuple[LockLine, ...]:
    """Every lock as it is, held against the matrix; no index is asked."""
    found = []
    for image in chosen:
        file = asker.root / image.lock
        try:
            lock = read_image_lock(file)
            check_lock(lock, gather_inputs(images, image, asker.project), file)
            found.append(LockLine(target=image.target, file=image.lock, stale="", count=len(lock.packages)))
        except ImageRefused as refusal:
            found.append(LockLine(target=image.target, file=image.lock, stale=str(refusal), count=0))
    for name, place, hashed, what in (
        (SESSIONS, images.sessions.lock, hash_sessions(images, asker.project), "other groups of pyproject.toml"),
        (RELEASES, images.releases.lock, hash_releases(images, asker.releases), "other releases of stacks.toml"),
    ):
        text = _read_text(asker.root / place)
        stale = "" if _says(text, hashed) else f"it was made from {what}" if text else "it is not there"
        if not stale and is_sealed(text) is not True:
            stale = f"it {EDITED}"
        found.append(LockLine(target=name, file=place, stale=stale, count=len(_PIN.findall(text))))
    return tuple(found)


def hash_sessions(images: Images, project: Mapping[str, Any]) -> str:
    """What the constraints of nox sessions follow from, as a hash."""
    sessions = images.sessions
    groups = {name: project.get("dependency-groups", {}).get(name) for name in sessions.groups}
    told = [sessions.python, sessions.groups, sessions.without, project["project"]["dependencies"], groups]
    return sha256(repr(told).encode()).hexdigest()


def compare_packages(
    before: Mapping[str, tuple[str, frozenset[str]]], after: Mapping[str, tuple[str, frozenset[str]]]
) -> tuple[PackageLine, ...]:
    """What changes between two locks: name -> version and hashes of each."""
    found = []
    for name in sorted({*before, *after}):
        old, new = before.get(name, ("", frozenset())), after.get(name, ("", frozenset()))
        if old != new:
            found.append(PackageLine(name=name, before=old[0], after=new[0], files=old[0] == new[0]))
    return tuple(found)


def write_together(root: Path, files: Iterable[Written]) -> tuple[str, ...]:
    """Write files that belong together: all of them aside, then each in its place. A full disk changes nothing.

    Returns:
        those that were not what they are now.

    Raises:
        OSError: a place cannot be written; what was there is there still.
    """
    wanted = [one for one in files if _read_text(root / one.file) != one.text]
    aside = {one.file: (root / one.file).with_name(f".{Path(one.file).name}.{os.getpid()}") for one in wanted}
    try:
        for one in wanted:
            aside[one.file].parent.mkdir(parents=True, exist_ok=True)
            with aside[one.file].open("wb") as stream:
                stream.write(one.text.encode())
                stream.flush()
                os.fsync(stream.fileno())
        for one in wanted:
            aside[one.file].replace(root / one.file)
    finally:
        for place in aside.values():
            with suppress(OSError):
                place.unlink(missing_ok=True)
    return tuple(one.file for one in wanted)


def _say_stale(before: str, after: str, inputs_hash: str) -> str:
    if not before:
        return "it was not there"
    if (sealed := is_sealed(before)) is not True:
        return f"it {EDITED}" if sealed is False else "it does not say yet what it hashes to"
    if not _says(before, inputs_hash):
        return "the matrix or pyproject.toml asks for something else now"
    return "the index has other files, or what was locked fits no more" if before != after else ""


def _refuse_lost_files(file: str, before: str, after: str, upgrade: Iterable[str]) -> str:
    """Why a lock is not written: the index has no longer a file that it was locked with, in the same version.

    What more the index has is no difference. A lock that was edited by hand, or never sealed, proves nothing.
    """
    taken = {name if name == "*" else str(canonicalize_name(name)) for name in upgrade}
    if not is_sealed(before) or "*" in taken:
        return ""
    old, new = _packages(before), _packages(after)
    lost = [name for name in old if name in new and old[name][0] == new[name][0] and old[name][1] - new[name][1]]
    words = [
        f"{name} {old[name][0]} (sha256 {', '.join(sorted(one[:12] for one in old[name][1] - new[name][1]))})"
        for name in sorted(set(lost) - taken)
    ]
    if not words:
        return ""
    return (
        f"{file}: the index no longer has files of {', '.join(words)}, which are locked in the same version. Likely "
        "cause: another index than the lock was made from, or a file was put in the place of another. "
        "Next step: ask the index that the lock was made from; find out what changed, then `nox -s lock -- "
        f"--upgrade {sorted(set(lost) - taken)[0]}`, and commit what it writes."
    )


def _says(text: str, inputs_hash: str) -> bool:
    return f"\n# inputs: sha256:{inputs_hash}\n" in text


def _packages(text: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Name -> version, or versions where there are several, and the hashes of their files."""
    found: dict[str, tuple[str, frozenset[str]]] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        if pinned := _PIN.match(line):
            name = canonicalize_name(pinned[1])
            versions = {pinned[2], *filter(None, found.get(name, ("", None))[0].split(", "))}
            found[name] = ", ".join(sorted(versions)), found.get(name, ("", frozenset()))[1]
        if hashes := _HASH.findall(line):
            found[name] = found[name][0], found[name][1] | set(hashes)
    return found


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")  # what is damaged is not what was written
    except (FileNotFoundError, NotADirectoryError):
        return ""
