"""Environments that are built: kept by key, built once, and never used half made.

A build happens in a folder of its own, under a lock of its key. Its last act is the seal, a file that records every
file by name and size; then the folder is renamed into place. So what has a seal that fits is whole, whatever was
killed and when, and what was damaged afterwards is built again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import platformdirs
from filelock import FileLock, Timeout

from ..evidence.whole_file import write_whole
from ..process import run_command
from .environment import NoEnvironment
from .identity import hash_parts

VARIABLE: Final = "MEGACPP_ENVIRONMENTS"
_SEAL: Final = ".sealed.json"
_LAST_WORDS: Final = 1200  # characters
_LONGEST_WAIT_S: Final = 7200.0  # another process builds the same: a stack with torch takes minutes on a slow disk
_KEY: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")

Make = Callable[[Path], None]
"""Makes an environment in an empty folder or raises NoEnvironment. It is moved afterwards."""


@dataclass(frozen=True)
class BuildCache:
    """A folder of environments; it is made where it does not exist."""

    root: Path

    def find(self, key: str) -> Path | None:
        """The environment of a key, if it has all that it had when it was sealed, and nothing more."""
        place = self.root / key
        try:
            sealed = json.loads((place / _SEAL).read_bytes())["files"]
            return place if sealed == _hash_files(place) else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def build(self, key: str, make: Make, waits_s: float = _LONGEST_WAIT_S) -> Path:
        """The environment of a key, built if it does not exist; a build of another process is waited for.

        Args:
            key: names what it is made from: lower-case letters, digits, `.`, `_`, `-`.
            make: makes it in the folder that it is given.
            waits_s: seconds to wait for another process that builds the same.

        Raises:
            NoEnvironment: it cannot be made, or the folder cannot be written. Nothing is kept of a failure.
        """
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is no key: lower-case letters, digits, '.', '_' and '-' only")
        if found := self.find(key):
            return found
        try:
            (self.root / ".locks").mkdir(parents=True, exist_ok=True)
            with FileLock(self.root / ".locks" / key, timeout=waits_s):
                return self.find(key) or self._make(key, make)
        except Timeout as fault:
            raise NoEnvironment(
                f"another process has been building {key} in {self.root} for {waits_s:g} s. Likely cause: it hangs. "
                "Next step: find the process that holds that lock, and end it."
            ) from fault
        except OSError as fault:
            raise NoEnvironment(
                f"an environment cannot be built in {self.root}: {fault}. Likely cause: the disk is full, or that "
                f"folder belongs to another user. Next step: make room, or name another folder in {VARIABLE}."
            ) from fault

    def _make(self, key: str, make: Make) -> Path:
        place, aside = self.root / key, self.root / ".making"
        aside.mkdir(exist_ok=True)
        for left in aside.glob(f"{key}@*"):  # of builds that were killed: we hold the lock, so none is running
            shutil.rmtree(left, ignore_errors=True)
        # A name of its own each time: what a killed build started may still be writing in the other one.
        work = Path(tempfile.mkdtemp(prefix=f"{key}@", dir=aside))
        try:
            made = work / "made"
            made.mkdir()
            make(made)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            write_whole(made / _SEAL, json.dumps({"key": key, "made": now, "files": _hash_files(made)}))
            if place.is_dir():  # without a seal, or damaged since
                place.rename(work / "unsealed")
            made.rename(place)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return place


def open_cache(variables: Mapping[str, str]) -> BuildCache:
    """The user's environments: where `MEGACPP_ENVIRONMENTS` points, else in the user's cache folder."""
    named = variables.get(VARIABLE, "")
    return BuildCache(
        Path(named).absolute() if named else Path(platformdirs.user_cache_dir("megacpp-validate"), "envs")
    )


def run_tool(
    words: Sequence[str], variables: Mapping[str, str], *, deed: str, cause: str, step: str, limit_s: float,
    cleanup: Sequence[str] = (),
) -> str:  # fmt: skip
    """Run a tool that helps to make an environment; what it wrote.

    Args:
        words, variables: what is started, with which environment variables.
        deed, cause, step: of the error's text: "uv cannot ...", the likely cause, and the next step.
        limit_s: seconds that it may take.
        cleanup: a command that removes what outlives it, as in `Call`.

    Raises:
        NoEnvironment: it failed; the text has its last words.
    """
    try:
        ended = run_command(words, variables=variables, limit_s=limit_s, cleanup=cleanup)
    except OSError as fault:
        raise NoEnvironment(f"{deed}: {fault}. Likely cause: {cause}. Next step: {step}.") from fault
    if ended.code == 0:
        return ended.words
    how = f"exit status {ended.code}" if ended.how == "exit" else ended.how
    last = " | ".join(line.strip() for line in ended.words.splitlines() if line.strip())[-_LAST_WORDS:]
    raise NoEnvironment(f"{deed} ({how}). Output: {last or 'nothing'}. Likely cause: {cause}. Next step: {step}.")


def _hash_files(folder: Path) -> str:
    """A hash over the name and the size of every file, but for the seal and what Python writes there by itself."""
    found: list[str] = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        inside = Path(place).relative_to(folder)
        found += [f"{inside / name} {Path(place, name).lstat().st_size}" for name in files if not name.endswith(".pyc")]
    return hash_parts(sorted(line for line in found if not line.startswith(f"{_SEAL} ")))
