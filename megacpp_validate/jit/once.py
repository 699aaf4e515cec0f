"""Ranks that start cold compile each kernel once: one rank compiles, the others wait and read it from the cache.

The guard works where the caches are shared (MEGACPP_JIT_ROOT is set). A lock that fails never ends a run: the failure
is reported once, and the kernel is compiled without the lock.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from filelock import FileLock  # in every stack: torch requires it

ROOT: Final = "MEGACPP_JIT_ROOT"
ARCH: Final = "MEGACPP_JIT_ARCH"
WAIT: Final = "MEGACPP_JIT_WAIT_S"
# Less than a launcher allows a run to be silent (training.smoke.run.SILENT_S), and longer than the longest compile.
WAIT_S: Final = 90.0
MISSED: Final[Any] = object()
_PLAIN: Final = re.compile(r"[A-Za-z0-9_-]{1,120}")
Made = TypeVar("Made")
_guards: Final[list[Guard]] = []  # of this process: one or none


class Guard:
    """One process at a time compiles a key; the kernel of the system frees the lock of a process that was killed.

    Args:
        folder: of the locks.
        wait_s: that another process is waited for; then this one compiles without the lock.

    Attributes:
        notes: what a person should know, each thing once.
        waited: seconds that were spent waiting for others.
    """

    def __init__(self, folder: Path, *, wait_s: float = WAIT_S) -> None:
        self.folder, self.notes, self.waited = folder, list[str](), 0.0
        self._wait_s = wait_s
        self._held = threading.local()  # names of the locks of this thread

    def once(self, key: str, look: Callable[[], Made], make: Callable[[], Made]) -> Made:
        """What a cache has by now, or is made here: `begin`, `make`, `end`."""
        found, turn = self.begin(key, look)
        if found is not MISSED:
            return found
        try:
            return make()
        finally:
            self.end(turn)

    def begin(self, key: str, look: Callable[[], Made]) -> tuple[Made, FileLock | None]:
        """Wait for the lock of a key that the cache lacks.

        Args:
            key: of the kernel.
            look: into the cache once more, when the lock is held; MISSED where the cache has nothing.

        Returns:
            What the cache has by now and None; or MISSED and the lock, to be given to `end` when the kernel is in the
            cache. The lock is None where it could not be had: the kernel is then compiled without.
        """
        name = key if _PLAIN.fullmatch(key) else hashlib.sha256(key.encode()).hexdigest()
        held = self._held.__dict__.setdefault("names", set())
        if name in held:  # a compile inside the same compile would wait for itself
            return MISSED, None
        began = time.monotonic()
        try:
            from filelock import FileLock

            self.folder.mkdir(parents=True, exist_ok=True)
            turn = FileLock(self.folder / name, timeout=self._wait_s, thread_local=False)
            turn.acquire(poll_interval=0.02)
        except Exception as fault:  # whatever it is: a run is worth more than a compile that is saved
            self._report(fault, name)
            return MISSED, None
        finally:
            self.waited += time.monotonic() - began
        held.add(name)
        found = MISSED
        try:
            found = look()
        except BaseException:
            self.end(turn)
            raise
        if found is MISSED:
            return found, turn
        self.end(turn)
        return found, None

    def end(self, turn: FileLock | None) -> None:
        """Release the lock: other processes look into the cache now."""
        if turn is not None:
            self._held.names.discard(Path(turn.lock_file).name)
            turn.release()

    def _report(self, fault: Exception, name: str) -> None:
        if isinstance(fault, TimeoutError):
            note = (
                f"another process has been compiling {name} for over {self._wait_s:g} s, and is not waited for any "
                f"longer. Likely cause: it hangs. Next step: see who holds {self.folder / name}, or raise {WAIT}."
            )
        else:
            why = getattr(fault, "strerror", None) or f"{type(fault).__name__}: {fault}"
            note = (
                f"each process compiles for itself: no lock can be had in {self.folder}: {why}. Likely cause: a cache "
                "that is sealed, a folder of another user, or a file system without flock. Next step: make it "
                "writable, or prewarm it."
            )
        if note not in self.notes:
            self.notes.append(note)
            sys.stderr.write(f"JIT caches: {note}\n")


def open_guard() -> Guard | None:
    """The guard of this process, once made.

    Returns:
        None where the caches are not shared, or MEGACPP_JIT_GUARD is "0".
    """
    root, arch = os.environ.get(ROOT, ""), os.environ.get(ARCH, "")
    if not root or not arch or os.environ.get("MEGACPP_JIT_GUARD", "") == "0":
        _guards.clear()
    elif not _guards:
        wait = os.environ.get(WAIT, "")
        _guards.append(Guard(Path(root, arch, "locks"), wait_s=float(wait) if wait.isdecimal() else WAIT_S))
    return current()


def current() -> Guard | None:
    """The guard of this process, if it has one."""
    return _guards[0] if _guards else None
