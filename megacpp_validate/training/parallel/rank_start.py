"""The start of a rank: runs a module so that it ends with its launcher, and leaves word of why it failed.

    python -m megacpp_validate.training.parallel.rank_start MODULE [ARGUMENT ...]

`launch` starts ranks so, and `torchrun -m` does for `host_run`: the variables are torchrun's (RANK, LOCAL_RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT). The module then calls `join_ranks`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

from ...evidence.whole_file import write_whole
from .collective_record import CollectiveRecord, watch_collectives
from .rank_guard import WHERE, stand_guard

FOLDER: Final = "MEGACPP_RUN_FOLDER"
LAUNCHER: Final = "MEGACPP_LAUNCHER_PID"
STORE: Final = "MEGACPP_STORE_DESCRIPTOR"  # the listening socket of the rendezvous, at rank 0
OWN_LOG: Final = "MEGACPP_RANK_OWN_LOG"  # set where the rank opens its log itself: torchrun would name it by local rank


@dataclass(frozen=True)
class Rank:
    """One rank that has joined.

    Attributes:
        rank, world: its number and how many there are.
        local_rank: on its host.
        device: "cpu" or "cuda:<local_rank>".
        folder: of the run, if a launcher gave one.
        record: of its collectives; None without a folder.
    """

    rank: int
    world: int
    local_rank: int
    device: str
    folder: Path | None
    record: CollectiveRecord | None

    def beat(self, step: int) -> None:
        """A sign of life, once a step."""
        if self.record is not None:
            self.record.beat(step)

    def write_receipt(self, value: Mapping[str, Any]) -> None:
        """Leave this rank's receipt, which the launcher gathers; nothing without a folder."""
        if self.folder is not None:
            write_whole(receipt_path(self.folder, self.rank), json.dumps(value, allow_nan=False))


def receipt_path(folder: Path, rank: int) -> Path:
    """Where a rank leaves its receipt."""
    return folder / f"rank-{rank}.json"


def record_path(folder: Path, rank: int) -> Path:
    """Where a rank keeps its collectives."""
    return folder / f"rank-{rank}.collectives"


def failure_path(folder: Path, rank: int) -> Path:
    """Where a rank says why it failed."""
    return folder / f"rank-{rank}.failure.json"


def log_path(folder: Path, rank: int) -> Path:
    """Where everything lands that a rank prints."""
    return folder / f"rank-{rank}.log"


def process_path(folder: Path, rank: int) -> Path:
    """Where a rank with a log of its own leaves its process id, which is of use on its host alone."""
    return folder / f"rank-{rank}.process"


@contextmanager
def join_ranks(backend: Literal["gloo", "nccl"], *, seconds: float = 600.0) -> Iterator[Rank]:
    """Join the other ranks: the world's process group, with every collective recorded.

    Args:
        backend: "nccl" takes the GPU of the local rank.
        seconds: that a collective may take; more than the launcher waits, which names who is at fault.
    """
    import torch
    from torch import distributed

    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    folder = Path(os.environ[FOLDER]) if FOLDER in os.environ else None
    record = CollectiveRecord(record_path(folder, rank)) if folder is not None else None
    made: dict[str, Any] = {"rank": rank, "world_size": world, "timeout": timedelta(seconds=seconds)}
    if LAUNCHER in os.environ:
        made["store"] = _store(rank, world, seconds)
    device = "cpu"
    if backend == "nccl":
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
        made["device_id"] = torch.device(device)
    if record is not None:
        watch_collectives(record)
    distributed.init_process_group(backend, **made)
    yield Rank(rank, world, local, device, folder, record)
    distributed.destroy_process_group()  # not after a failure: it would wait for those that are gone


def _store(rank: int, world: int, seconds: float) -> Any:
    """The rendezvous of a launcher. Rank 0 takes over the socket that listens already: nobody can take its port."""
    from torch import distributed

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    made: dict[str, Any] = {"timeout": timedelta(seconds=seconds), "wait_for_workers": False}
    if rank == 0:
        made["master_listen_fd"] = int(os.environ[STORE])
    return distributed.TCPStore(host, port, world, rank == 0, **made)


def main() -> None:
    """Run the module; the exit status is 1 where it raises."""
    if OWN_LOG in os.environ:
        _take_log(Path(os.environ[FOLDER]), int(os.environ["RANK"]))
    stand_guard(int(os.environ[LAUNCHER]) if LAUNCHER in os.environ else None)
    faulthandler.enable()  # a crash in compiled code leaves its Python frames in the log
    faulthandler.register(WHERE, all_threads=True)
    if len(sys.argv) < 2:
        sys.exit("usage: python -m megacpp_validate.training.parallel.rank_start MODULE [ARGUMENT ...]")
    module = sys.argv.pop(1)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception as fault:
        _tell(fault)
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the teardown of a group that lost a rank may wait for it


def _take_log(folder: Path, rank: int) -> None:
    write_whole(process_path(folder, rank), str(os.getpid()))
    with log_path(folder, rank).open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def _tell(fault: BaseException) -> None:
    if FOLDER in os.environ:
        value = {"at": time.monotonic(), "fault": f"{type(fault).__name__}: {fault}"}
        with suppress(OSError):
            write_whole(failure_path(Path(os.environ[FOLDER]), int(os.environ["RANK"])), json.dumps(value))


if __name__ == "__main__":
    main()
