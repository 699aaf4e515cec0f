"""What the compilers of this process did, in order; and the lock by which cold ranks compile each kernel once.

The guard works where the caches are shared (MEGACPP_JIT_ROOT is set): one rank compiles, the others wait and read the
kernel from the cache. A lock that fails never ends a run: the failure is reported once, and the kernel is compiled
without the lock.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from filelock import FileLock  # in every stack: torch requires it

LONGEST: Final = 400  # characters of a shape: a signature of thirty arguments says nothing that its first twenty do not
_seen: list[Compile] = []
_lock: Final = threading.Lock()


@dataclass(frozen=True)
class Compile:
    """One kernel or graph that was needed and not in memory.

    Attributes:
        library: "triton", "inductor", "cute", "fa4", "deep_gemm", "cuda" (the driver).
        kernel: its name.
        shape: what it was compiled for: shapes, or the signature and its constants.
        seconds: that it took; of a hit, 0.
        cached: whether a cache on disk had it.
        looked_for: key or name under which a cache keeps it, where the library tells.
    """

    library: str
    kernel: str
    shape: str
    seconds: float
    cached: bool
    looked_for: str = ""


def saw(library: str, kernel: str, shape: str, seconds: float, *, cached: bool, looked_for: str = "") -> None:
    """Note a compile, or a hit."""
    short = shape if len(shape) <= LONGEST else f"{shape[:LONGEST]} ..."
    with _lock:
        _seen.append(Compile(library, kernel, short, round(seconds, 4), cached, looked_for))


def seen_since(mark: int = 0) -> tuple[Compile, ...]:
    """What was noted after `mark`, which is the length of the list then."""
    with _lock:
        return tuple(_seen[mark:])


def words_of(value: Any) -> str:
    """A value as a shape has it: "bf16[8,512]" of a tensor, a list of such, else its text."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        kind = str(value.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
        return f"{kind}[{','.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(words_of, value))})"
    return str(value)


# --- one process compiles ---------------------------------------------------------------------------------------------

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
            why = f"no lock can be had: {getattr(fault, 'strerror', None) or f'{type(fault).__name__}: {fault}'}"
            if isinstance(fault, TimeoutError):
                why = f"another process has been compiling for over {self._wait_s:g} s ({WAIT}), and is not waited for"
            note = f"this process compiles for itself what lies behind {self.folder / name}: {why}"
            if not any(why in earlier for earlier in self.notes):
                self.notes.append(note)
                sys.stderr.write(f"JIT caches: {note}\n")
            return MISSED, None
        finally:
            self.waited += time.monotonic() - began
        held.add(name)
        found = MISSED
        try:
            found = look()
        finally:
            if found is not MISSED or sys.exc_info()[0]:
                self.end(turn)
        return found, turn if found is MISSED else None

    def end(self, turn: FileLock | None) -> None:
        """Release the lock: other processes look into the cache now."""
        if turn is not None:
            self._held.names.discard(Path(turn.lock_file).name)
            turn.release()


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
