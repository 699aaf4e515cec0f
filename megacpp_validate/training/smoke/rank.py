"""One rank of a smoke run: trains its part, and leaves its receipt, also of a run that fails.

    python -m megacpp_validate.training.parallel.rank_start megacpp_validate.training.smoke.rank ORDER

ORDER is a file of `order.SmokeOrder`.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..parallel.goodput import Ledger, process_began_ns
from ..parallel.rank_start import Rank, join_ranks
from .faults import plant
from .order import SmokeOrder, read_order
from .receipt import make_receipt
from .trainer import NotFinite, SmokeTrainer
from .waits import profile_step


def train_rank(order: SmokeOrder, rank: Rank) -> None:
    """Train, and leave a receipt.

    Raises:
        TrainingError: whatever ended the run early; what was seen until then is in the receipt.
    """
    ledger = Ledger(began_ns=process_began_ns(), memory=_memory_of(order.device))
    trainer: SmokeTrainer | None = None
    fault: Exception | None = None
    try:
        with ledger.phase("start-up"):
            trainer = SmokeTrainer(order, rank, ledger)
            planted = plant(order.fault, trainer)
        trainer.run(lambda one: _after(one, planted))
    except Exception as caught:
        fault = caught
        raise
    finally:
        if trainer is not None:
            found = fault.found if isinstance(fault, NotFinite) else None
            rank.write_receipt(make_receipt(trainer, ledger, found=found, fault=fault))


def main() -> None:
    """Read the order, join the others, train."""
    order = read_order(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if order.device == "cpu":
        torch.set_num_threads(1)  # ranks stand side by side
    with join_ranks("nccl" if order.device == "cuda" else "gloo") as rank:
        train_rank(order, rank)


def _after(trainer: SmokeTrainer, planted: Callable[[SmokeTrainer], None] | None) -> None:
    if planted is not None:
        planted(trainer)
    if trainer.order.profile and len(trainer.records) == PROFILED and trainer.done < trainer.order.steps:
        profile_step(trainer)


PROFILED = 5  # steps that are done before one is profiled: kernels are compiled by then


def _memory_of(device: str) -> Callable[[], int]:
    if device == "cpu":
        return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def peak() -> int:
        most = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return int(most)

    return peak


if __name__ == "__main__":
    main()
