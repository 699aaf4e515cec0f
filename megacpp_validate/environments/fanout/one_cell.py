"""What a job runs: one cell, on the machine that the scheduler chose.

    python -m megacpp_validate.environments.fanout.one_cell FOLDER/job

The cell is run as it is in a session on one machine, and leaves its receipt in the folder of its job. A job that is
told to end leaves none: whoever gave it decides what that means.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ...process import Processes
from ..room import count_cores
from .faults import claim
from .shipped import JobUnreadable, read_job


def main() -> None:
    """Run it; the exit status is 0 wherever a receipt was written, whatever is in it."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m megacpp_validate.environments.fanout.one_cell FOLDER/job")
    signal.signal(signal.SIGTERM, _end)
    path = Path(sys.argv[1])
    cores = os.environ.get("SLURM_CPUS_ON_NODE", "")
    threads = cores if cores.isdigit() else str(count_cores())
    try:
        cell = read_job(path, {"OMP_NUM_THREADS": threads, **os.environ})
    except JobUnreadable as fault:
        sys.exit(str(fault))
    if not claim(path.parent):
        sys.exit(f"{path.parent} is taken: another job runs this attempt, or it was given up. Nothing was run.")
    with tempfile.TemporaryDirectory(prefix="megacpp-") as scratch:
        receipt = cell.run(Path(scratch, "cell"), Processes())
    sys.stdout.write(f"{receipt.outcome.value} {receipt.cell}: {receipt.reason or 'nothing to say'}\n")


def _end(number: int, _: FrameType | None) -> NoReturn:
    """Python's own answer to SIGTERM would leave the process of the cell to its guard, and its folder to nobody."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
