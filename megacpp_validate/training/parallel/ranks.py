"""A rank from inside: joins the process group, records its collectives, leaves a receipt, and ends with torchrun.

The variables are torchrun's (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), so a module that calls
`join_ranks` runs under a plain `torchrun -m MODULE` too; `launch` adds a folder, where logs and records go.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
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

FOLDER: Final = "MEGACPP_RUN_FOLDER"
HOST: Final = "MEGACPP_RUN_HOST"  # which launcher started the rank
LAUNCHER: Final = "MEGACPP_LAUNCHER_PID"
AGENT: Final = "MEGACPP_AGENT_PID"
STACKS: Final = signal.SIGUSR1  # every thread's stack goes to the log
_GRACE: Final = 1.0  # seconds a failed rank waits before it exits, so that ranks that fail alike can report it too
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


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
        """Write this rank's receipt, which the launcher gathers; nothing without a folder."""
        if self.folder is not None:
            write_whole(receipt_path(self.folder, self.rank), json.dumps(value, allow_nan=False))


def receipt_path(folder: Path, rank: int) -> Path:
    """Where a rank leaves its receipt."""
    return folder / f"rank-{rank}.json"


def record_path(folder: Path, rank: int) -> Path:
    """Where a rank keeps its collectives."""
    return folder / f"rank-{rank}.collectives"


def error_path(folder: Path, rank: int) -> Path:
    """Torchrun's error file of a rank (TORCHELASTIC_ERROR_FILE): what it raised."""
    return folder / f"rank-{rank}.error.json"


def log_paths(folder: Path, rank: int | str) -> tuple[Path, Path]:
    """Where a rank's output goes: standard output, standard error."""
    return folder / f"rank-{rank}.stdout.log", folder / f"rank-{rank}.stderr.log"


def end_with_parent(parent: int | None) -> None:
    """Have the kernel kill this process when its parent ends (Linux alone).

    Args:
        parent: process id of the expected parent, if known: where another one is the parent, that one is gone already,
            and this process exits.
    """
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, is gone")


@contextmanager
def join_ranks(backend: Literal["gloo", "nccl"], *, seconds: float = 600.0) -> Iterator[Rank]:
    """Join the other ranks: the world's process group, with every collective recorded.

    An exception inside ends the process with exit status 1; torchrun's error file and the log keep the exception.

    Args:
        backend: "nccl" takes the GPU of the local rank.
        seconds: that a collective may take; more than the launcher waits, which names the rank at fault.
    """
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    end_with_parent(int(os.environ[AGENT]) if AGENT in os.environ else None)
    faulthandler.enable()  # a crash in compiled code leaves its Python frames in the log
    faulthandler.register(STACKS, all_threads=True)
    folder = Path(os.environ[FOLDER]) if FOLDER in os.environ else None
    record = None if folder is None else CollectiveRecord(record_path(folder, rank), os.environ.get(HOST, ""))
    try:
        import torch
        from torch import distributed

        made: dict[str, Any] = {"timeout": timedelta(seconds=seconds)}
        device = "cpu"
        if backend == "nccl":
            device = f"cuda:{local}"
            torch.cuda.set_device(local)
            made["device_id"] = torch.device(device)
        distributed.init_process_group(backend, **made)
        if record is not None:
            watch_collectives(record)
            record.beat()  # from here on the launcher counts silence
        yield Rank(rank, world, local, device, folder, record)
        if record is not None:
            record.beat()
        distributed.destroy_process_group()
    except Exception as fault:
        _fail(fault)


def _fail(fault: Exception) -> None:
    """Leave the fault in torchrun's error file and end: the teardown of a group that lost a rank may wait for it."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    get_error_handler().record_exception(fault)
    time.sleep(_GRACE)
    os._exit(1)
