"""A rank from inside: joins the process group, records its collectives, leaves a receipt, and ends with torchrun.

The variables are torchrun's (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), so a module that calls
`join_ranks` runs under a plain `torchrun -m MODULE` too; `launch` adds a folder, where logs and records go.

NCCL's flight recorder knows its own collectives and writes when they time out; the record here knows those of every
backend, costs about 12 microseconds each, outlives a rank that is killed or hangs, and is read from outside at any
time.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import json
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

from ...evidence.receipt import write_whole

FOLDER: Final = "MEGACPP_RUN_FOLDER"
HOST: Final = "MEGACPP_RUN_HOST"  # which launcher started the rank
STACKS: Final = signal.SIGUSR1  # every thread's stack goes to the log
_GRACE: Final = 1.0  # seconds a failed rank waits before it exits, so that ranks that fail alike can report it too
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
SLOT: Final = 512  # bytes: a group's last collective as JSON, padded with NUL
SLOTS: Final = 64  # the first is the sign of life; groups beyond the last one share it
# Attributes of torch.distributed, which FSDP2 and checkpoints look up at each call.
COLLECTIVES: Final = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend",
    "recv", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send",
)  # fmt: skip


def rank_path(folder: Path, rank: int | str, kind: str) -> Path:
    """A file of a rank in the folder of its run.

    Args:
        folder: of the run.
        rank: of the world.
        kind: "json" (receipt), "collectives" (record), "error.json" (torchrun's error file), "stdout.log" or
            "stderr.log".
    """
    return folder / f"rank-{rank}.{kind}"


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)


@contextmanager
def join_ranks(backend: Literal["gloo", "nccl"], *, seconds: float = 600.0) -> Iterator[Rank]:
    """Join the other ranks: the world's process group, with every collective recorded.

    An exception inside ends the process with exit status 1; torchrun's error file and the log keep the exception.

    Args:
        backend: "nccl" takes the GPU of the local rank.
        seconds: that a collective may take; more than the launcher waits, which names the rank at fault.
    """
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    end_with_parent()
    faulthandler.enable()  # a crash in compiled code leaves its Python frames in the log
    faulthandler.register(STACKS, all_threads=True)
    folder = Path(os.environ[FOLDER]) if FOLDER in os.environ else None
    path = None if folder is None else rank_path(folder, rank, "collectives")
    record = CollectiveRecord(path, os.environ.get(HOST, ""))
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
        watch_collectives(record)
        record.beat()  # from here on the launcher counts silence
        yield Rank(rank, world, device, folder, record)
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


# --- record


@dataclass(frozen=True)
class Collective:
    """The last collective of one rank in one group.

    Attributes:
        operation: by its name in torch.distributed.
        group: ranks of the group.
        number: of the collective among those of the group, from 1.
        state: whether the call still waits, is over (one that is not waited for at once: was issued), or raised.
        shape: of its first tensor, with the dtype; empty where it has none.
        at: of that state, seconds of the host's monotonic clock.
    """

    operation: str
    group: tuple[int, ...]
    number: int
    state: Literal["inside", "left", "raised"]
    shape: str
    at: float

    def words(self) -> str:
        """For a message: "all_reduce float32[4] #3 of ranks 0, 1 (inside)"."""
        shape = f" {self.shape}" if self.shape else ""
        return f"{self.operation}{shape} #{self.number} of ranks {', '.join(map(str, self.group))} ({self.state})"


@dataclass(frozen=True)
class RankRecord:
    """What the record of a rank says.

    Attributes:
        alive_at: its last sign of life, seconds of its host's monotonic clock; 0 until its process group is up.
        step: of that sign; -1 before the first step.
        collectives: the last one of each group, the latest last.
        pid: of its process.
        host: which launcher started it.
        steps: whether it is between its first step and the end of its run; a start and an exit give no sign of life.
    """

    alive_at: float = 0.0
    step: int = -1
    collectives: tuple[Collective, ...] = ()
    pid: int = 0
    host: str = ""
    steps: bool = False

    @property
    def last(self) -> Collective | None:
        """The latest collective of all groups."""
        return self.collectives[-1] if self.collectives else None

    @property
    def seen_at(self) -> float:
        """Time of the last change."""
        return max(self.alive_at, self.last.at if self.last else 0.0)


class CollectiveRecord:
    """Writes the file of one rank.

    Args:
        path: of the file; made anew. None keeps the record in memory.
        host: which launcher started the rank.

    Attributes:
        seconds_inside: in collectives, of the calls that wait.
        is_inside: whether one is open.
    """

    def __init__(self, path: Path | None = None, host: str = "") -> None:
        if path is None:
            self._map = mmap.mmap(-1, SLOT * SLOTS)
        else:
            path.write_bytes(b"\0" * SLOT * SLOTS)
            with path.open("r+b") as stream:
                self._map = mmap.mmap(stream.fileno(), SLOT * SLOTS)
        self._groups: dict[tuple[int, ...], list[int]] = {}  # group -> slot, number of its last collective
        self.seconds_inside, self.is_inside = 0.0, False
        self._who = {"pid": os.getpid(), "host": host}
        self._step = -1
        self._write(0, {"alive_at": 0.0, "step": -1, **self._who})

    def beat(self, step: int | None = None) -> None:
        """A sign of life: a run whose ranks give none, and are in no new collective, is taken to hang.

        Args:
            step: that begins; None outside of the steps, before the first and after the last.
        """
        self._step = self._step if step is None else step
        self._write(0, {"alive_at": time.monotonic(), "step": self._step, "steps": step is not None, **self._who})

    @contextmanager
    def inside(self, operation: str, group: tuple[int, ...], shape: str = "") -> Iterator[None]:
        """A region in which this rank is in a collective."""
        known = self._groups.setdefault(group, [min(len(self._groups) + 1, SLOTS - 1), 0])
        known[1] += 1
        slot, number = known
        entered, state = time.monotonic(), "raised"

        def write(state: Any) -> None:
            one = Collective(operation, group, number, state, shape, time.monotonic())
            self._write(slot, vars(one))

        write("inside")
        self.is_inside = True
        try:
            yield
            state = "left"
        finally:
            self.is_inside = False
            self.seconds_inside += time.monotonic() - entered
            write(state)

    def _write(self, slot: int, value: Mapping[str, Any]) -> None:
        text = json.dumps(value).encode()
        if len(text) > SLOT:  # a group of very many ranks: its ends say which
            text = json.dumps({**value, "group": [value["group"][0], value["group"][-1]], "shape": ""}).encode()
        self._map[slot * SLOT : (slot + 1) * SLOT] = text.ljust(SLOT, b"\0")


@dataclass(frozen=True)
class Rank:
    """One rank that has joined; without arguments a process alone on the CPU.

    Attributes:
        rank, world: its number and how many there are.
        device: "cpu" or "cuda:<rank on its host>".
        folder: of the run, if a launcher gave one.
        record: of its collectives; in memory alone without a folder.
    """

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    folder: Path | None = None
    record: CollectiveRecord = field(default_factory=CollectiveRecord)

    def write_receipt(self, value: Mapping[str, Any]) -> None:
        """Write this rank's receipt, which the launcher gathers; nothing without a folder."""
        if self.folder is not None:
            write_whole(rank_path(self.folder, self.rank, "json"), json.dumps(value, allow_nan=False))


def read_record(path: Path) -> RankRecord:
    """The record of a rank; an empty one where there is no file, and without a slot that it died in the middle of."""
    if not path.exists():
        return RankRecord()
    whole = path.read_bytes()
    slots: list[dict[str, Any]] = []
    for start in range(0, len(whole), SLOT):
        with suppress(ValueError):
            slots.append(json.loads(whole[start : start + SLOT].rstrip(b"\0")))
    alive = next((slot for slot in slots if "pid" in slot), {})
    found = [Collective(**{**slot, "group": tuple(slot["group"])}) for slot in slots if "group" in slot]
    return RankRecord(**alive, collectives=tuple(sorted(found, key=lambda one: one.at)))


def find_behind(records: Mapping[int, RankRecord]) -> tuple[int, ...]:
    """The ranks that the others wait for, as far as their records tell; empty where none is behind.

    In a group the ranks that have come less far are behind; of those, one that waits in a collective itself waits for
    another one, so the others come first. Where all have come as far, it is those whose collective is another.

    Args:
        records: rank -> its record.
    """
    behind: set[int] = set()
    for group in {one.group for record in records.values() for one in record.collectives}:
        in_group = {
            rank: next((one for one in records[rank].collectives if one.group == group), None)
            for rank in group
            if rank in records
        }
        # How far a rank has come: twice the number that it has left, one more inside the next.
        places = {rank: 0 if one is None else 2 * one.number - (one.state != "left") for rank, one in in_group.items()}
        behind |= {rank for rank, place in places.items() if place < max(places.values())}
        operations = [one.operation for one in in_group.values() if one is not None]
        if len(set(places.values())) == 1 and len(set(operations)) > 1:
            usual = max(sorted(set(operations)), key=operations.count)
            behind |= {rank for rank, one in in_group.items() if one is not None and one.operation != usual}
    absent = {rank for rank, record in records.items() if not record.seen_at and not record.pid}
    behind |= absent if len(absent) < len(records) else set()  # the others wait at the rendezvous
    free = {rank for rank in behind if (last := records[rank].last) is None or last.state == "left"}
    return tuple(sorted(free or behind))


def watch_collectives(record: CollectiveRecord) -> None:
    """From now on, in this process, record the collectives of torch.distributed."""
    from torch import distributed

    for name in COLLECTIVES:
        if (function := getattr(distributed, name, None)) is not None:
            setattr(distributed, name, _recorded(function, name, record))


def _recorded(function: Callable[..., Any], name: str, record: CollectiveRecord) -> Callable[..., Any]:
    import torch
    from torch import distributed

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        # A traced collective is issued by compiled code, not here; one that another is made of is that other.
        if torch.compiler.is_compiling() or record.is_inside:
            return function(*given, **named)
        values = [*given, *named.values()]
        tensor = next((value for value in values if isinstance(value, torch.Tensor)), None)
        shape = "" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        group = next((value for value in values if isinstance(value, distributed.ProcessGroup)), None)
        world = range(distributed.get_world_size())
        ranks = world if group is None else distributed.get_process_group_ranks(group)
        with record.inside(name, tuple(ranks), shape):
            return function(*given, **named)

    return call
