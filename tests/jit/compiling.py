"""One process that compiles a list of keys, as a rank does: `python -m ... FOLDER SEED`.

The kernel of a key is a file. A lock on a second file shows whether two processes compile one key at once: the kernel
of the system frees it when a process is killed.
"""

from __future__ import annotations

import fcntl
import random
import sys
import time
from pathlib import Path
from typing import IO, Any

from megacpp_validate.jit.compiles import MISSED, Guard


def main() -> None:
    """Every key, in an order of its own."""
    folder, seed, keys = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    guard, order = Guard(folder / "locks"), list(range(keys))
    (folder / f"ready-{seed}").touch()
    while not (folder / "go").exists():
        time.sleep(0.002)
    random.Random(seed).shuffle(order)
    for key in order:
        guard.once(f"kernel-{key}", lambda key=key: look(folder, key), lambda key=key: make(folder, key))


def look(folder: Path, key: int) -> Any:
    """What the cache has."""
    place = folder / f"{key}.kernel"
    return place.read_text() if place.exists() else MISSED


def make(folder: Path, key: int) -> str:
    """Compile: a few milliseconds in which a process may be killed."""
    with (folder / f"{key}.busy").open("a") as busy:
        if not is_alone(busy):
            note(folder, f"overlap {key}")
        time.sleep(0.04)
        aside = folder / f"{key}.{random.getrandbits(60)}"
        aside.write_text("made")
        note(folder, f"made {key}")
        aside.rename(folder / f"{key}.kernel")
        time.sleep(0.002)
    return "made"


def is_alone(busy: IO[str]) -> bool:
    """Whether nobody compiles it, after a moment: of a killed process a thread may hold its files when it is over."""
    for _ in range(20):
        try:
            fcntl.flock(busy, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.001)
        else:
            return True
    return False


def note(folder: Path, line: str) -> None:
    """One line of the log that all share."""
    with (folder / "log").open("a") as log:
        log.write(line + "\n")


if __name__ == "__main__":
    main()
