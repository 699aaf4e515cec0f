"""What the ranks of the smoke run's tests do: a trainer in this process, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from megacpp_validate.bridge.parallel_hooks import local_part
from megacpp_validate.training.parallel.goodput import Ledger
from megacpp_validate.training.parallel.ranks import Rank
from megacpp_validate.training.smoke.order import SmokeOrder
from megacpp_validate.training.smoke.trainer import SmokeTrainer

EXPERTS = {"data": 2, "expert_parallel": 2}
DATA = {"data": 2}
POSITIONS = {"tensor_parallel": 2}
# Losses of routers that weigh, so that a share that is left out shows; attention that two ranks can split; the MTP
# head, whose shared block stays whole after its forward pass.
CHANGES = {"batch": 4, "num_gqa_groups": 2, "mtp": True, "aux_coefficient": 0.5, "z_coefficient": 0.1}


def order_of(**given: Any) -> SmokeOrder:
    """Of `tiny`, in fp64, a few steps."""
    order = SmokeOrder(**{"precision": "fp64", "steps": 3, "changes": CHANGES, "features": {"preset": "off"}, **given})
    order.refuse()
    return order


def new_trainer(order: SmokeOrder) -> SmokeTrainer:
    """The part of this rank in a world that is there; without one it is alone."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    return SmokeTrainer(order, Rank(rank), Ledger(began_ns=time.monotonic_ns()))


def train(given: dict[str, Any]) -> dict[str, Any]:
    """Run an order to its end: losses, norms, evaluations, and the weights that lie here."""
    trainer = new_trainer(order_of(**given))
    trainer.run()
    return {
        "losses": [record.loss for record in trainer.records],
        "others": [record.aux_loss for record in trainer.records],
        "norms": [record.grad_norm for record in trainer.records],
        "validation": trainer.validation,
        "resumed": trainer.done - len(trainer.records),
        "weights": {name: local_part(one).detach().clone() for name, one in trainer.optimizer.parameters().items()},
        "dispatches": None if trainer.audit is None else trainer.audit.dispatches,
        "replicas": None if trainer.audit is None else trainer.audit.replicas,
        "part_norms": None if trainer.audit is None else trainer.audit.part_norms,
        "lacking": None if trainer.audit is None else trainer.audit.experts_without_gradient(),
    }


def train_all(orders: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several, one after the other."""
    return [train(order) for order in orders]


@contextmanager
def alone() -> Iterator[None]:
    """A world of this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def bounds(given: dict[str, Any], wanted: dict[str, Any]) -> dict[str, list[float]]:
    """How far each step of another order of the same sums may be off in fp64, relative.

    The run in fp32 has one draw of the roundings, in units of u as large as those in fp64, and carried on by the same
    derivatives; two runs in fp64 differ by two draws. 16 is for a draw that was lucky, and what came before a step
    counts for it too.
    """
    rough = train({**given, "precision": "fp32"})
    found = {}
    for name in ("losses", "norms"):
        off = [abs(one / other - 1) for one, other in zip(rough[name], wanted[name], strict=True)]
        found[name] = [2 * 16 * max(off[: step + 1]) * 2.0**-53 / 2.0**-24 for step in range(len(off))]
        assert 0 < max(found[name]) < 1e-10
    return found


def assert_follows(seen: dict[str, Any], wanted: dict[str, Any], most: dict[str, list[float]], first: int = 0) -> None:
    """Losses and norms of a run are those of another, from a step on."""
    for name in ("losses", "norms"):
        rest = wanted[name][first:]
        assert len(seen[name]) == len(rest)
        off = [abs(one / other - 1) for one, other in zip(seen[name], rest, strict=True)]
        assert all(one <= bound for one, bound in zip(off, most[name][first:], strict=True)), (name, off, most[name])


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
