"""A lock on a key in a folder that processes of several hosts share, by nothing but `mkdir` and `rename`.

A lock is a folder KEY with one file in it, whose name says who holds it. A folder that has a file is renamed to KEY:
that works where KEY is not there or is empty, and nowhere else, in one step (rename(2), ENOTEMPTY). A holder that is
gone is followed by renaming its file to one's own: of several that try, one finds the name that it judged. So no lock
is ever taken away from a holder that nobody judged, which deleting or replacing a lock file cannot promise. No flock:
on network file systems it is a matter of the mount.

Who is gone: on this host, a process that is no more, or whose number another has now; on another host, one whose file
has not been touched for a while. Both times of that are the file system's own: clocks of two hosts are never compared.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import uuid
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

STALE_S: Final = 60.0  # without a sign of life, of a holder on another host; a compile in C++ may keep Python still
_NOT_PLAIN: Final = re.compile(r"[^A-Za-z0-9-]")
_OVER: Final = ("Z", "X", "x")  # states of proc(5): killed, and only not yet waited for


@dataclass(frozen=True)
class Owner:
    """Who holds a lock.

    Attributes:
        host: its name.
        kernel: of which boot and which namespace of processes `pid` is.
        pid: process.
        began: of that process, in ticks since the boot: numbers are used again.
        mark: of this one lock.
    """

    host: str
    kernel: str
    pid: int
    began: int
    mark: str

    @property
    def name(self) -> str:
        """The file that says so."""
        return f"{self.host}.{self.kernel}.{self.pid}.{self.began}.{self.mark}"

    def words(self) -> str:
        """For a person."""
        return f"process {self.pid} of {self.host}"


def read_owner(name: str) -> Owner | None:
    """From the name of its file; None of another file."""
    parts = name.split(".")
    if len(parts) != 5 or not (parts[2].isdigit() and parts[3].isdigit()):
        return None
    return Owner(parts[0], parts[1], int(parts[2]), int(parts[3]), parts[4])


def new_owner() -> Owner:
    """This process, for one lock."""
    return Owner(_host(), _kernel(), os.getpid(), _began(os.getpid()) or 0, uuid.uuid4().hex[:12])


class KeyLock:
    """One try for a key.

    Args:
        folder: of all locks; made where it is not there.
        key: letters, digits, "-" and "_".
        stale_s: without a sign of life, of a holder on another host.
    """

    def __init__(self, folder: Path, key: str, *, stale_s: float = STALE_S) -> None:
        self.folder, self.place, self.owner = folder, folder / key, new_owner()
        self._stale_s = stale_s
        self._mine = self.place / self.owner.name

    def take(self) -> bool:
        """Hold the key, where nobody does.

        Raises:
            OSError: the folder cannot be written.
        """
        if self.holder() is not None:
            return False
        aside = self.folder / f".{self.owner.mark}"
        aside.mkdir(parents=True, exist_ok=True)
        (aside / self.owner.name).touch()
        try:
            aside.rename(self.place)
        except OSError as fault:
            if self._mine.exists():  # a network file system asked twice, and the first time it had worked
                return True
            with suppress(OSError):
                (aside / self.owner.name).unlink()
                aside.rmdir()
            if fault.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
        return True

    def follow(self, gone: Owner) -> bool:
        """Hold the key after a holder that is gone; False where another did so first, or it was none."""
        before = self.place / gone.name
        try:
            os.utime(before)  # first: who sees the new name must not judge it by the old time
            before.rename(self._mine)
        except OSError:
            return self._mine.exists()
        return True

    def holder(self) -> Owner | None:
        """Who holds the key; None where nobody does. An empty folder, left by who died between two steps, is nobody."""
        try:
            names = sorted(entry.name for entry in self.place.iterdir())
        except FileNotFoundError:
            return None
        owners = [owner for owner in map(read_owner, names) if owner is not None]
        return owners[0] if owners else None

    def is_gone(self, holder: Owner) -> bool:
        """Whether a holder lives no more."""
        if holder.kernel == _kernel() and holder.host == _host() and holder.began:
            return _began(holder.pid) != holder.began
        touched = _touched(self.place / holder.name)
        return touched is not None and self._now() - touched > self._stale_s

    def beat(self) -> None:
        """A sign of life."""
        with suppress(OSError):
            os.utime(self._mine)  # without times: a network file system then takes its server's

    def drop(self) -> None:
        """Let go; nothing where another has followed meanwhile."""
        with suppress(OSError):
            self._mine.unlink()
            self.place.rmdir()

    def _now(self) -> float:
        """The time of the file system: that of a file written there now."""
        probe = self.folder / f".now.{self.owner.mark}"
        try:
            probe.write_bytes(b"")
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)


def _touched(path: Path) -> float | None:
    """When a file was last touched; opened for it, because a network file system may answer from memory otherwise."""
    try:
        with path.open("rb") as stream:
            return os.fstat(stream.fileno()).st_mtime
    except OSError:
        return None


def _host() -> str:
    return _NOT_PLAIN.sub("-", socket.gethostname())[:64] or "-"


@cache
def _kernel() -> str:
    """This boot and this namespace of processes: only there does a number mean the same process."""
    boot = namespace = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:13]
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return _NOT_PLAIN.sub("", f"{boot}-{namespace.removeprefix('pid:')}") or "-"


def _began(pid: int) -> int | None:
    """When a process began, in ticks since the boot; None where there is none, or one that is only not waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # proc(5): from field 3 on
        return None if fields[0] in _OVER else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
