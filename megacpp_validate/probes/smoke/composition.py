"""All bridge modules at once: the hybrid model trained for a few steps on one device.

In bf16 beside native layers, and in production's recipe. The model runs in the probe's own process, so that an
exception of a module is raised here as its own probe sees it, and is filed under it. A fault that no module's probe
shows lies between modules.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Final

import torch

from ...training.parallel.goodput import Ledger
from ...training.parallel.launch import RunEnd
from ...training.parallel.ranks import Rank
from ...training.smoke.order import SmokeOrder
from ...training.smoke.rank import make_receipt, make_trainer
from ..bench import Bench
from .reproduce import Reference, compare_trajectories, reference_of, twins_of
from .runs import Run, Trajectory, check_parts

STEPS: Final = 6


def probe(bench: Bench) -> None:
    """bf16 beside native layers, step by step; then production's recipe, which must stay finite."""
    on_gpu = bench.device == "cuda"
    order = SmokeOrder(
        size=bench.setting("size", "gate") if on_gpu else "tiny",
        steps=int(bench.setting("steps", str(STEPS))),
        seed=bench.order.seed,
        device="cuda" if on_gpu else "cpu",
        precision="bf16" if on_gpu else "fp32",
        target=bench.order.target.id,
        audit=True,
    )
    trained = check_run(bench, "bf16", order)
    native = train_reference(replace(order, features={"preset": "off"}))
    for quantity, check in compare_trajectories(trained, native).items():
        kind = "forward" if quantity == "loss" else "grad"
        bench.checks.append(replace(check, name=f"bf16.train.{kind}.{quantity}"))
    recipe: Any = bench.order.target.production_recipe
    if bench.wants_te and recipe and recipe in bench.recipes:
        check_run(bench, recipe, replace(order, precision=recipe))


def check_run(bench: Bench, name: str, order: SmokeOrder) -> Trajectory:
    """Train in this process; every step finite, every part on the requested backend."""
    run = train(order, name)
    losses = run.trajectory.losses
    # A step that is not finite raises before this.
    bench.check(
        f"{name}.train.finite", len(losses) == order.steps, f"losses {', '.join(f'{one:.4f}' for one in losses)}"
    )
    check_parts(bench, run)
    return run.trajectory


def train_reference(order: SmokeOrder) -> Reference:
    """One rank and its twins, in this process."""
    orders = twins_of({"accumulate": order.read_plan().accumulate}, order.changes)
    return reference_of([train(replace(order, **changes)).trajectory for changes in orders], order)


def train(order: SmokeOrder, name: str = "") -> Run:
    """Train a run of one rank to its end."""
    torch.manual_seed(order.seed)
    device = "cuda:0" if order.device == "cuda" else "cpu"
    trainer = make_trainer(order, Rank(device=device), Ledger(began_ns=time.monotonic_ns()))
    trainer.run()
    if order.device == "cuda":
        torch.cuda.synchronize()
    receipt = make_receipt(trainer, trainer.ledger)
    return Run(name, order, RunEnd("done", (), "", ({"rank": 0, "receipt": receipt},), 0.0))
