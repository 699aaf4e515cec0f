"""One rank of a smoke run: trains its part, and leaves its receipt, also of a run that fails.

    torchrun --nproc-per-node 2 -m megacpp_validate.training.smoke.rank ORDER

ORDER is a file of `order.SmokeOrder`.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from ...jit.start import start_compiling
from ..parallel.goodput import Ledger, process_began_ns
from ..parallel.ranks import Rank, join_ranks
from .order import SmokeOrder, read_order
from .receipt import make_receipt
from .same_bits import keep_bits
from .trainer import NotFinite, SmokeTrainer


def train_rank(order: SmokeOrder, rank: Rank) -> None:
    """Train, and leave a receipt.

    A run that fails in its steps leaves what was seen until then. One that fails before there is a model has no
    receipt: the launcher tells what was raised.

    Raises:
        TrainingError, BridgeError: whatever ended the run early.
    """
    ledger = Ledger(began_ns=process_began_ns(), memory=_memory_of(order.device))
    with ledger.phase("start-up"):
        trainer = SmokeTrainer(order, rank, ledger)
    try:
        with ledger.phase("start-up"):
            planted = _plant(order.fault, trainer)
        trainer.run(planted)
    except Exception as fault:
        with suppress(Exception):  # the fault is what counts, whatever of the trainer can still be read
            found = fault.found if isinstance(fault, NotFinite) else None
            rank.write_receipt(make_receipt(trainer, ledger, found=found, fault=fault))
        raise
    rank.write_receipt(make_receipt(trainer, ledger, found=None, fault=None))


def main() -> None:
    """Read the order, join the others, train."""
    order = read_order(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if order.device == "cpu":
        torch.set_num_threads(1)  # ranks stand side by side
    if order.checkpoint_folder:
        order = replace(order, checkpoint_folder=str(Path(order.checkpoint_folder).absolute()))
    start_compiling()  # before anything is compiled: ranks on one cache compile each kernel once
    if order.deterministic:
        keep_bits()
    with join_ranks("nccl" if order.device == "cuda" else "gloo") as rank:
        train_rank(order, rank)


def _plant(fault: str, trainer: SmokeTrainer) -> Callable[[SmokeTrainer], None] | None:
    if not fault:
        return None
    from .faults import plant  # and FSDP2 with it

    return plant(fault, trainer)


def _memory_of(device: str) -> Callable[[], int]:
    if device == "cpu":  # of the process so far: the kernel keeps no other
        return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def peak() -> int:
        most = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return int(most)

    return peak


if __name__ == "__main__":
    main()
