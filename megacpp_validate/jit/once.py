"""Ranks that start cold compile each kernel once: one does, the others wait and take it from the cache.

`guard_compiles` is called at the start of a rank or a probe. It is of use where the caches are shared (MEGACPP_JIT_ROOT
is set), and must never cost a run: what goes wrong in it is told once, and the compile goes on without.
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
from typing import Any, Final, TypeVar

from .key_lock import STALE_S, KeyLock, Owner

ROOT: Final = "MEGACPP_JIT_ROOT"
ARCH: Final = "MEGACPP_JIT_ARCH"
SWITCH: Final = "MEGACPP_JIT_GUARD"  # "0" leaves every rank to itself
WAIT: Final = "MEGACPP_JIT_WAIT_S"
# Less than a launcher allows a run to be silent (training.smoke.run.SILENT_S), and longer than the longest compile.
WAIT_S: Final = 90.0
BEAT_S: Final = 2.0
MISSED: Final[Any] = object()
_PLAIN: Final = re.compile(r"[A-Za-z0-9_-]{1,120}")
Made = TypeVar("Made")
_guards: Final[list[Guard]] = []  # of this process: one or none


class Guard:
    """Turns at compiling, one process a key.

    Args:
        folder: of the locks.
        wait_s: that another is waited for; then one compiles oneself.
        stale_s: without a sign of life, of a process on another host.

    Attributes:
        notes: what a person should know of it, each thing once.
        waited: seconds that were spent waiting for others.
    """

    def __init__(self, folder: Path, *, wait_s: float = WAIT_S, stale_s: float = STALE_S) -> None:
        self.folder, self.notes, self.waited = folder, list[str](), 0.0
        self._wait_s, self._stale_s = wait_s, stale_s
        self._held: dict[str, tuple[KeyLock, int]] = {}  # mark -> turn, and the thread that has it
        self._beats: threading.Thread | None = None
        self._mutex = threading.Lock()

    def once(self, key: str, look: Callable[[], Made], make: Callable[[], Made]) -> Made:
        """What a cache has by now, or is made here: `begin`, `make`, `end`."""
        found, turn = self.begin(key, look)
        if found is not MISSED:
            return found
        try:
            return make()
        finally:
            self.end(turn)

    def begin(self, key: str, look: Callable[[], Made]) -> tuple[Made, KeyLock | None]:
        """Wait for one's turn at a key that the cache lacks.

        Args:
            key: of the kernel.
            look: into the cache once more; MISSED where it has nothing. Called after others were waited for.

        Returns:
            What the cache has by now and None; or MISSED and the turn, to be given to `end` when the kernel is in the
            cache. The turn is None where there is none to be had: the kernel is then compiled without.
        """
        name = _file_name(key)
        with self._mutex:
            if any(turn.place.name == name and who == threading.get_ident() for turn, who in self._held.values()):
                return MISSED, None  # a compile inside the same compile: to wait for oneself is to wait for ever
        try:
            return self._begin(KeyLock(self.folder, name, stale_s=self._stale_s), look)
        except Exception as fault:  # whatever it is: a run is worth more than a compile that is saved
            why = getattr(fault, "strerror", None) or f"{type(fault).__name__}: {fault}"  # without the key: said once
            self.tell(
                f"each process compiles for itself: no lock can be had in {self.folder}: {why}. "
                "Likely cause: a cache that is sealed, or a folder of another user. Next step: make it writable, or "
                "prewarm it."
            )
            return MISSED, None

    def end(self, turn: KeyLock | None) -> None:
        """Let the others look."""
        if turn is not None:
            with self._mutex:
                self._held.pop(turn.owner.mark, None)
            turn.drop()

    def tell(self, note: str) -> None:
        """Say something once."""
        if note not in self.notes:
            self.notes.append(note)
            sys.stderr.write(f"JIT caches: {note}\n")

    def _begin(self, turn: KeyLock, look: Callable[[], Any]) -> tuple[Any, KeyLock | None]:
        began, pause, before = time.monotonic(), 0.005, None
        while True:
            holder = turn.holder()
            if holder is None or turn.is_gone(holder):
                if before is not None or holder is not None:  # somebody held it: perhaps it is there now
                    found = look()
                    if found is not MISSED:
                        self.waited += time.monotonic() - began
                        return found, None
                if turn.take() if holder is None else turn.follow(holder):
                    return self._is_mine(turn, look, began)
            before = holder or before
            if time.monotonic() - began > self._wait_s:
                self.waited += time.monotonic() - began
                self.tell(self._say_over(turn, before))
                return MISSED, None
            time.sleep(pause)
            pause = min(0.25, pause * 1.5)

    def _say_over(self, turn: KeyLock, holder: Owner | None) -> str:
        """That the wait is over, and what stood in the way."""
        if holder is None:
            return (
                f"nobody holds {turn.place}, and it could not be had in {self._wait_s:g} s. Likely cause: something "
                "else lies in it, or its file system does not rename as it should. Next step: remove it."
            )
        return (
            f"{holder.words()} has been compiling {turn.place.name} for over {self._wait_s:g} s, and is not waited for "
            f"any longer. Likely cause: it hangs. Next step: look at it, or raise {WAIT}."
        )

    def _is_mine(self, turn: KeyLock, look: Callable[[], Any], began: float) -> tuple[Any, KeyLock | None]:
        """The turn was had; between the caller's look and now somebody may have come, compiled and gone."""
        self.waited += time.monotonic() - began
        with self._mutex:
            self._held[turn.owner.mark] = turn, threading.get_ident()
            if self._beats is None or not self._beats.is_alive():
                self._beats = threading.Thread(target=self._beat, name="jit-locks", daemon=True)
                self._beats.start()
        try:
            found = look()
        except BaseException:
            self.end(turn)
            raise
        if found is not MISSED:
            self.end(turn)
            return found, None
        return MISSED, turn

    def _beat(self) -> None:
        """Signs of life of all turns that are held; ends when there are none."""
        while True:
            time.sleep(BEAT_S)
            with self._mutex:
                held = [turn for turn, _ in self._held.values()]
                if not held:
                    self._beats = None
                    return
            for turn in held:
                turn.beat()

    def forget(self) -> None:
        """In a child that was forked: what its parent holds is not its own."""
        self._held, self._beats, self._mutex = {}, None, threading.Lock()


def guard_compiles() -> Guard | None:
    """Have the compilers of this process take turns with those of others on the same caches; once is enough.

    Returns:
        The guard; None where the caches are not shared, or MEGACPP_JIT_GUARD is "0".
    """
    root, arch = os.environ.get(ROOT, ""), os.environ.get(ARCH, "")
    if not root or not arch or os.environ.get(SWITCH, "") == "0":
        _guards.clear()
    elif not _guards:
        _guards.append(Guard(Path(root, arch, "locks"), wait_s=_seconds(os.environ.get(WAIT, ""))))
        os.register_at_fork(after_in_child=_guards[0].forget)
    from .monitor import watch_compilers

    watch_compilers()
    return current()


def current() -> Guard | None:
    """The guard of this process, if it has one."""
    return _guards[0] if _guards else None


def _file_name(key: str) -> str:
    return key if _PLAIN.fullmatch(key) else hashlib.sha256(key.encode()).hexdigest()


def _seconds(text: str) -> float:
    try:
        return max(0.0, float(text))
    except ValueError:
        return WAIT_S
