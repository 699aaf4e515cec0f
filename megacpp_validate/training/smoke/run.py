"""A smoke run from outside: refuses what cannot be, starts the ranks, and brings home what became of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ..parallel.launch import Limits, RunEnd, launch
from .order import SmokeOrder, write_order

RANK: Final = "megacpp_validate.training.smoke.rank"
ORDER: Final = "order.json"


@dataclass(frozen=True)
class SmokeResult:
    """What became of a run.

    Attributes:
        ending: "done" only where every rank ended well and left a receipt.
        culprits: ranks at fault.
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
        return {**asdict(self), "receipts": None, "ranks": list(self.receipts.values())}


def run_smoke(
    order: SmokeOrder,
    folder: Path,
    *,
    limit_s: float = 600.0,
    silent_s: float = 120.0,
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
        TrainingError: an order that cannot be; no process was started.
    """
    order.refuse()
    folder.mkdir(parents=True, exist_ok=True)
    write_order(order, folder / ORDER)
    end = launch(
        RANK,
        [str((folder / ORDER).absolute())],
        ranks=order.read_plan().world,
        folder=folder,
        limits=Limits(whole=limit_s, silent=min(silent_s, limit_s)),
        environment=environment,
    )
    return read_end(end)


def read_end(end: RunEnd) -> SmokeResult:
    """What a launcher brought home."""
    receipts = {rank.rank: rank.receipt for rank in end.ranks if rank.receipt is not None}
    accused = sorted({rank for receipt in receipts.values() for rank in receipt["culprits"]})
    return SmokeResult(end.ending, tuple(accused) or end.culprits, end.words, end.seconds, receipts)
