"""torchrun under a guard: it ends with whoever started it, and leaves each dead rank's exit status as JSON.

    python -m megacpp_validate.training.parallel.torchrun_start DEATHS_FILE TORCHRUN_ARGUMENT ...

torchrun itself prints these codes in a table and returns 1.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ...evidence.whole_file import write_whole
from .rank_guard import stand_guard
from .rank_start import LAUNCHER


def main() -> None:
    """Run torchrun; the exit status is 1 where a rank failed."""
    stand_guard(int(os.environ.pop(LAUNCHER)))  # popped: the parent of a rank is torchrun
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    deaths = Path(sys.argv[1])
    try:
        run.main(sys.argv[2:])
    except ChildFailedError as fault:
        dead = {rank: {"code": one.exitcode, "at": one.timestamp} for rank, one in fault.failures.items()}
        write_whole(deaths, json.dumps(dead))
        sys.exit(1)


if __name__ == "__main__":
    main()
