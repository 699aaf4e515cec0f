"""How long a step waits for other ranks: the time in which collectives run on the device and nothing else does.

On the CPU it is the time inside collectives whose call waits, of which the record of a rank keeps the sum; those that
are waited for later (FSDP2's, the sums of gradients) count as step. On a GPU a step is profiled: the union of the
kernels of NCCL less the union of all other kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from .trainer import SmokeTrainer

Interval = tuple[float, float]
PROFILED: Final = 5  # steps that are done before one is profiled: kernels are compiled by then
WARM: Final = 3  # steps that compile and warm up


@dataclass(frozen=True)
class StepWaits:
    """Of one profiled step, in seconds.

    Attributes:
        step: which.
        communication: in which a collective ran.
        exposed: in which a collective ran and no other kernel.
        busy: in which any kernel ran.
    """

    step: int
    communication: float
    exposed: float
    busy: float


def measure_waits(step: int, collectives: Iterable[Interval], others: Iterable[Interval]) -> StepWaits:
    """From the intervals of kernels, in microseconds: each (begin, end)."""
    talking, working = merge(collectives), merge(others)
    both = length(merge([*talking, *working]))
    return StepWaits(step, length(talking) / 1e6, (both - length(working)) / 1e6, both / 1e6)


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as intervals that do not touch, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def length(merged: Sequence[Interval]) -> float:
    """The sum of their lengths."""
    return sum(end - begin for begin, end in merged)


def profile_step(trainer: SmokeTrainer) -> StepWaits | None:
    """Do one step under the profiler, which makes it slower; without a GPU a plain step, and None."""
    if trainer.order.device != "cuda":
        trainer.step()
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        trainer.step()
        torch.cuda.synchronize()
    collectives: list[Interval] = []
    others: list[Interval] = []
    for event in seen.events():
        # A region that the host names, such as FSDP2's, spans gaps and the kernels of both kinds.
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            span = event.time_range.start, event.time_range.end
            (collectives if "nccl" in event.name.lower() else others).append(span)
    trainer.waits = measure_waits(trainer.done - 1, collectives, others)
    return trainer.waits


def as_json(waits: StepWaits | None) -> dict[str, Any] | None:
    """For a receipt."""
    return None if waits is None else vars(waits)
