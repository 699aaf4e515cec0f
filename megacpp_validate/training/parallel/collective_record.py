"""Which collective a rank is in: kept in a mapped file, which outlives a rank that is killed or hangs.

NCCL's flight recorder knows its own collectives and writes when they time out; this one knows those of every backend,
costs about 12 microseconds each, and is read from outside at any time. A number is counted for each group: the rank
that is behind the others of a group is the one that they wait for.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

State = Literal["inside", "left", "raised"]
SLOT: Final = 512  # bytes: a group's last collective as JSON, padded with NUL
SLOTS: Final = 64  # the first is the sign of life; groups beyond the last one share it
# Both live as attributes of their modules, which FSDP2, DTensor and checkpoints look up at each call.
PLAIN: Final = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend",
    "recv", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send",
)  # fmt: skip
FUNCTIONAL: Final = (
    "all_gather_single", "all_gather_single_autograd", "all_gather_tensor", "all_gather_tensor_autograd", "all_reduce",
    "all_to_all_single", "all_to_all_single_autograd", "broadcast", "reduce_scatter_single",
    "reduce_scatter_single_autograd", "reduce_scatter_tensor", "reduce_scatter_tensor_autograd",
)  # fmt: skip


@dataclass(frozen=True)
class Collective:
    """The last collective of one rank in one group.

    Attributes:
        operation: by its name in torch.distributed.
        group: ranks of the group.
        number: of the collective among those of the group, from 1.
        order: among all of the rank, from 1.
        state: whether the call still waits, is over (one that is not waited for at once: was issued), or raised.
        shape: of its first tensor, with the dtype; empty where it has none.
        at: of that state, seconds of the host's monotonic clock.
    """

    operation: str
    group: tuple[int, ...]
    number: int
    order: int
    state: State
    shape: str
    at: float

    def words(self) -> str:
        """For a message: "all_reduce #3 of ranks 0, 1 (inside)"."""
        shape = f" {self.shape}" if self.shape else ""
        return f"{self.operation}{shape} #{self.number} of ranks {', '.join(map(str, self.group))} ({self.state})"


@dataclass(frozen=True)
class RankRecord:
    """What a rank left.

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
        """When anything moved."""
        return max(self.alive_at, self.last.at if self.last else 0.0)


class CollectiveRecord:
    """Writes the file of one rank.

    Args:
        path: of the file; made anew.
        host: which launcher started the rank.

    Attributes:
        seconds_inside: in collectives, of the calls that wait.
        is_inside: whether one is open.
    """

    def __init__(self, path: Path, host: str = "") -> None:
        with path.open("wb") as stream:
            stream.truncate(SLOT * SLOTS)
        with path.open("r+b") as stream:
            self._map = mmap.mmap(stream.fileno(), SLOT * SLOTS)
        self._slots: dict[tuple[int, ...], int] = {}
        self._numbers: dict[tuple[int, ...], int] = {}
        self._order, self.seconds_inside, self.is_inside = 0, 0.0, False
        self._who = {"pid": os.getpid(), "host": host}
        self._step = -1
        self._write(0, {"alive_at": 0.0, "step": -1, **self._who})

    def beat(self, step: int | None = None) -> None:
        """A sign of life: a run whose ranks give none, and are in no new collective, is taken to hang.

        Args:
            step: that begins; None outside of the steps, before the first and after the last.
        """
        self._step = self._step if step is None else step
        sign = {"alive_at": time.monotonic(), "step": self._step, "steps": step is not None}
        self._write(0, {**sign, **self._who})

    @contextmanager
    def inside(self, operation: str, group: tuple[int, ...], shape: str = "") -> Iterator[None]:
        """A region in which this rank is in a collective."""
        slot = self._slots.setdefault(group, min(len(self._slots) + 1, SLOTS - 1))
        self._numbers[group] = number = self._numbers.get(group, 0) + 1
        self._order += 1
        entered = time.monotonic()

        def write(state: State, at: float) -> None:
            self._write(slot, vars(Collective(operation, group, number, self._order, state, shape, at)))

        write("inside", entered)
        self.is_inside = True
        try:
            yield
        except BaseException:
            write("raised", time.monotonic())
            raise
        finally:
            self.is_inside = False
        left = time.monotonic()
        self.seconds_inside += left - entered
        write("left", left)

    def _write(self, slot: int, value: Mapping[str, Any]) -> None:
        text = json.dumps(value).encode()
        if len(text) > SLOT and "group" in value:  # a group of very many ranks: its ends say which
            text = json.dumps({**value, "group": [value["group"][0], value["group"][-1]], "shape": ""}).encode()
        self._map[slot * SLOT : (slot + 1) * SLOT] = text[:SLOT].ljust(SLOT, b"\0")


def read_record(path: Path) -> RankRecord:
    """What a rank left; nothing where there is no file, and without a slot that it died in the middle of."""
    try:
        whole = path.read_bytes()
    except OSError:
        return RankRecord()
    slots = []
    for start in range(0, len(whole), SLOT):
        try:
            slots.append(json.loads(whole[start : start + SLOT].rstrip(b"\0")))
        except ValueError:
            slots.append(None)
    alive = slots[0] if slots and slots[0] else {}
    found = [Collective(**{**slot, "group": tuple(slot["group"])}) for slot in slots[1:] if slot]
    latest_last = tuple(sorted(found, key=lambda one: one.order))
    return RankRecord(**alive, collectives=latest_last)


def find_behind(records: Mapping[int, RankRecord]) -> tuple[int, ...]:
    """The ranks that the others wait for, as far as their records tell; empty where none is behind.

    In a group the ranks that have come less far are behind; of those, one that waits in a collective itself waits for
    another one, so the others come first. Where all have come as far, it is those whose collective is another.

    Args:
        records: rank -> what it left.
    """
    behind: set[int] = set()
    for group in {one.group for record in records.values() for one in record.collectives}:
        in_group = {rank: _of_group(records[rank], group) for rank in group if rank in records}
        places = {rank: _place(one) for rank, one in in_group.items()}
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
    """From now on, in this process, record the collectives of torch.distributed and of its functional ones."""
    from torch import distributed
    from torch.distributed import _functional_collectives as functional

    for module, names in ((distributed, PLAIN), (functional, FUNCTIONAL)):
        for name in names:
            if (function := getattr(module, name, None)) is not None and not hasattr(function, "unrecorded"):
                setattr(module, name, _recorded(function, name, record))


def _recorded(function: Callable[..., Any], name: str, record: CollectiveRecord) -> Callable[..., Any]:
    import torch

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        # A traced collective is issued by compiled code, not here; one that another is made of is that other.
        if torch.compiler.is_compiling() or record.is_inside:
            return function(*given, **named)
        values = [*given, *named.values()]
        tensor = next((value for value in values if isinstance(value, torch.Tensor)), None)
        shape = "" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        with record.inside(name, _ranks_of(values), shape):
            return function(*given, **named)

    call.unrecorded = function  # type: ignore[attr-defined]
    return call


def _ranks_of(values: list[Any]) -> tuple[int, ...]:
    """Ranks of the group among a call's arguments; those of the world without one."""
    from torch import distributed

    meshes = sys.modules.get("torch.distributed.device_mesh")  # seconds to import: who has a mesh has done so
    for value in values:
        if isinstance(value, distributed.ProcessGroup):
            return tuple(distributed.get_process_group_ranks(value))
        mesh, where = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        if meshes is not None and isinstance(mesh, meshes.DeviceMesh):
            if where is not None or mesh.ndim == 1:
                return tuple(distributed.get_process_group_ranks(mesh.get_group(where)))
            return tuple(mesh.mesh.flatten().tolist())
    return tuple(range(distributed.get_world_size()))


def _of_group(record: RankRecord, group: tuple[int, ...]) -> Collective | None:
    return next((one for one in record.collectives if one.group == group), None)


def _place(one: Collective | None) -> int:
    """How far a rank has come in a group: twice the number that it has left, one more inside the next."""
    return 0 if one is None else 2 * one.number - (one.state != "left")
