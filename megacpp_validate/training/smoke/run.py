"""A smoke run from outside: refuses what cannot be, starts the ranks, and brings home what became of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ..parallel.launch import launch
from ..parallel.plan import WrongPlan
from ..parallel.verdict import Limits, RunEnd
from . import same_bits
from .order import SmokeOrder, write_order

RANK: Final = "megacpp_validate.training.smoke.rank"
ORDER: Final = "order.json"
SILENT_S: Final = 120.0  # without a sign of life on any rank; longer than the longest compile


@dataclass(frozen=True)
class SmokeResult:
    """What became of a run.

    Attributes:
        ending: "done" only where every rank ended well and left a receipt.
        culprits: ranks at fault; none where all ranks raise the same error.
        words: what happened, likely cause, next step; empty where it is done.
        seconds: wall time, of starting processes too.
        receipts: rank -> what it left; ranks that left nothing are missing.
    """

    ending: str
    culprits: tuple[int, ...]
    words: str
    seconds: float
    receipts: Mapping[int, Mapping[str, Any]]

    @property
    def first(self) -> Mapping[str, Any]:
        """The receipt of the lowest rank that left one; empty without any."""
        return self.receipts[min(self.receipts)] if self.receipts else {}

    def losses(self) -> list[float]:
        """Of each step, nats a prediction."""
        return [float(step["loss"]) for step in self.first.get("steps", ())]

    def norms(self) -> list[float]:
        """Of the gradients of each step."""
        return [float(step["grad_norm"]) for step in self.first.get("steps", ())]

    def as_json(self) -> dict[str, Any]:
        """For another process."""
        return {
            "ending": self.ending,
            "culprits": list(self.culprits),
            "words": self.words,
            "seconds": self.seconds,
            "ranks": [self.receipts[rank] for rank in sorted(self.receipts)],
        }


def run_smoke(
    order: SmokeOrder,
    folder: Path,
    *,
    limit_s: float = 600.0,
    silent_s: float = SILENT_S,
    environment: Mapping[str, str] | None = None,
) -> SmokeResult:
    """Run an order on ranks of this host.

    Args:
        order: what is trained.
        folder: of logs, receipts and the order; made, and cleared of what an earlier run left of its ranks.
        limit_s: of the whole run.
        silent_s: without a sign of life on any rank.
        environment: added to that of the ranks.

    Raises:
        TrainingError, BridgeError: an order that cannot be; no process was started.
        OSError: the folder cannot be written.
    """
    order.refuse()
    if order.fault:
        from .faults import refuse_fault  # and FSDP2 with it

        refuse_fault(order)
    order.refuse_target()
    _refuse_devices(order)
    folder.mkdir(parents=True, exist_ok=True)
    write_order(order, folder / ORDER)
    end = launch(
        RANK,
        [str((folder / ORDER).absolute())],
        ranks=order.read_plan().world,
        folder=folder,
        limits=Limits(whole=limit_s, silent=min(silent_s, limit_s)),
        environment={**environment_of(order), **(environment or {})},
    )
    return read_end(end)


def environment_of(order: SmokeOrder) -> dict[str, str]:
    """The variables that its ranks need, whoever starts them."""
    return dict(same_bits.VARIABLES) if order.deterministic else {}


def read_end(end: RunEnd) -> SmokeResult:
    """What a launcher brought home.

    A fault that all ranks raise alike (a checkpoint that cannot be taken, a disk that is full) accuses those that it
    names itself, and not the one that happened to end first.
    """
    receipts = {rank.rank: rank.receipt for rank in end.ranks if rank.receipt is not None}
    accused = tuple(sorted({rank for receipt in receipts.values() for rank in receipt["culprits"]}))
    said = {rank.fault for rank in end.ranks}
    if end.ending == "died" and len(end.ranks) > 1 and len(said) == 1 and (fault := said.pop()):
        words = f"every rank ended the run: {fault}. Logs: {end.ranks[0].log.parent}."
        return SmokeResult(end.ending, accused, words, end.seconds, receipts)
    return SmokeResult(end.ending, accused or end.culprits, end.words, end.seconds, receipts)


def _refuse_devices(order: SmokeOrder) -> None:
    world = order.read_plan().world
    if order.device == "cuda" and (found := torch.cuda.device_count()) < world:
        fault = f"the plan is of {world} rank(s), each with a GPU of its own, and {found} can be seen here"
        raise WrongPlan(
            f"{fault}. Next step: plan for {found}, or look at CUDA_VISIBLE_DEVICES; no process was started.", (fault,)
        )
