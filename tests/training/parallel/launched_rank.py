"""What the ranks of the launcher's tests do: `python -m launched_rank WHAT`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from megacpp_validate.training.parallel.ranks import join_ranks

RANK, WORLD, WHAT = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]
LAST = RANK == WORLD - 1


def main() -> None:
    """Sum, do what is asked, wait for the others, leave a receipt."""
    if WHAT == "never-joins" and LAST:
        time.sleep(100)
    with join_ranks("gloo", seconds=60) as rank:
        import torch
        from torch import distributed

        total = torch.full((3,), float(rank.rank))
        distributed.all_reduce(total)
        rank.record.beat(3)
        if WHAT == "slow":
            for step in range(1000):
                rank.record.beat(step)
                time.sleep(0.05)
        if WHAT == "leaves-child":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        if LAST:
            fail()
        distributed.all_reduce(total, distributed.ReduceOp.MAX)
        alone = distributed.new_group([0])
        if rank.rank == 0:
            distributed.all_reduce(total, group=alone)
        if not (WHAT == "forgets" and LAST):
            place = {"rank": rank.rank, "world": rank.world, "local": int(os.environ["LOCAL_RANK"])}
            rank.write_receipt({**place, "total": total.tolist()})
        sys.stdout.write(f"total {total.tolist()}\n")


def fail() -> None:
    """What the last rank does."""
    if WHAT == "leaves-child":
        os.kill(os.getpid(), signal.SIGKILL)
    if WHAT == "hangs":
        time.sleep(100)
    if WHAT == "raises":
        raise ValueError("a planted fault")
    if WHAT == "exits":
        os._exit(7)


if __name__ == "__main__":
    main()
