"""What the ranks of the launcher's tests do: `python -m launched_rank WHAT`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megacpp_validate.training.parallel.collective_record import CollectiveRecord
from megacpp_validate.training.parallel.rank_start import Rank, join_ranks, record_path

RANK, WORLD, FOLDER = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ.get("MEGACPP_RUN_FOLDER")
LAST = WORLD - 1


def alone(what: str) -> None:
    """Without torch: ranks that record collectives of their own making."""
    if what == "never-joins" and RANK == LAST:
        time.sleep(100)
    path = Path(FOLDER or ".")
    record = CollectiveRecord(record_path(path, RANK))
    rank = Rank(RANK, WORLD, RANK, "cpu", path, record)
    with record.inside("all_reduce", tuple(range(WORLD)), "float32[4]"):
        pass
    rank.beat(3)
    if what == "slow":
        for step in range(1000):
            rank.beat(step)
            time.sleep(0.05)
    if what == "hangs" and RANK == LAST:
        time.sleep(100)
    if what == "forgets" and RANK == LAST:
        return
    if what == "raises" and RANK == LAST:
        raise ValueError("a planted fault")
    if what == "exits" and RANK == LAST:
        sys.exit(7)
    if what in ("leaves-children", "waits"):
        for apart in (False, True):  # one of them has a session of its own
            child = [sys.executable, "-c", "import time; time.sleep(100)"]
            subprocess.Popen(child, start_new_session=apart)
        if what == "leaves-children" and RANK == LAST:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
    if what in ("hangs", "never-joins", "raises", "exits", "leaves-children", "waits"):
        with record.inside("barrier", tuple(range(WORLD))):
            time.sleep(100)
    rank.write_receipt({"rank": RANK})


def together(what: str) -> None:
    """With gloo."""
    with join_ranks("gloo", seconds=30) as rank:
        import torch
        from torch import distributed

        total = torch.full((3,), float(rank.rank))
        distributed.all_reduce(total)
        rank.beat(1)
        if what == "killed" and rank.rank == LAST:
            os.kill(os.getpid(), signal.SIGKILL)
        distributed.broadcast(total, 0)
        alone = distributed.new_group([0])
        if rank.rank == 0:
            distributed.all_reduce(total, group=alone)
        rank.write_receipt({"rank": rank.rank, "total": total.tolist(), "world": rank.world, "local": rank.local_rank})
        sys.stdout.write(f"total {total.tolist()}\n")


if __name__ == "__main__":
    kind, _, asked = sys.argv[1].partition("-")
    (together if kind == "gloo" else alone)(asked)
