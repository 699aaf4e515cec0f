"""Training step by step: BF16 and FP8 recipes with the same data and seeds, each run a curve beside the receipt.

Runs are processes that share the device: what a step of a small model costs is its launches, not its arithmetic. Here
is checked that every run ended, on what it ran, and what cast; whether FP8 follows BF16 is for the loss gate, on the
host, which judges the curves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import torch

from ...bridge.expert_gemm import SWITCH
from ...evidence.receipt import write_whole
from ...training.smoke.order import SmokeOrder
from ..bench import Bench
from ..fingerprint import read_version
from ..smoke.runs import Run, Runs, have_ended, note_casts, open_runs

REFERENCE: Final = "bf16"
QUICK_STEPS: Final = 30
LIMIT_S: Final = 3600.0  # the limit of the cell is shorter
# The work of a run is the device's; what FP8 does to the loss is looked at however few rows an expert has.
ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", SWITCH: "always"}
WARM_UP: Final = 0.1  # of the steps
# An eps that is small beside quiet gradients.
OPTIMISED: Final[dict[str, Any]] = {"learning_rate": 1e-3, "eps": 1e-15}


def probe(bench: Bench) -> None:
    """Train all runs at once, and look at what each left."""
    if _recipes(bench):
        bench.require_te("FP8 recipes")
    with open_runs(bench, limit_s=LIMIT_S, silent_s=LIMIT_S) as runs:
        orders = plan_orders(bench, runs)
        check_runs(bench, runs.train_beside(orders, [ENVIRONMENT] * len(orders)))


def plan_orders(bench: Bench, runs: Runs) -> dict[str, SmokeOrder]:
    """RECIPE.seedN -> BF16 and each recipe with every seed; seeds by seed: what is cut short lacks a seed of all."""
    seeds = [int(seed) for seed in bench.setting("seeds", "0 1 2").split()]
    steps = int(bench.setting("steps", "1000"))
    if bench.quick:
        seeds, steps = seeds[:1], QUICK_STEPS
    given: dict[str, Any] = {"task": "gate", "data_seed": bench.order.seed, "audit": False, **OPTIMISED}
    given |= {"steps": steps, "schedule_steps": steps, "warm_up": int(WARM_UP * steps)}
    return {
        f"{recipe}.seed{seed}": runs.order(precision=recipe, seed=seed, **given)
        for seed in seeds
        for recipe in (REFERENCE, *_recipes(bench))
    }


def _recipes(bench: Bench) -> list[str]:
    return bench.setting("recipes", "delayed current").split()


def check_runs(bench: Bench, runs: Sequence[Run]) -> None:
    """What every run left: a whole curve, on the backends that were asked for, with the casts that it shows."""
    for run in runs:
        have_ended(bench, run)
        left, order = run.first, run.order
        path = bench.artefact(f"{order.precision}-{order.seed}.curve")
        path.unlink(missing_ok=True)  # of an earlier session
        if not left:
            bench.check(f"{run.name}.curve", False, "the run left no curve")
            continue
        made_with = {"torch": torch.__version__, "transformer_engine": read_version(("transformer_engine",))}
        curve = {**left["curve"], "made_with": {**made_with, "gpu": left["topology"]["device"]}}
        write_whole(path, json.dumps(curve) + "\n")
        whole = curve["steps"] == list(range(order.steps))
        finite = None not in curve["losses"] + curve["gradient_norms"]
        said = f"{len(curve['steps'])} of {order.steps} steps{'' if finite else ', one of them not finite'}"
        bench.check(f"{run.name}.curve", whole and finite, said)
        # Every part that has a choice took what was asked for, as it says itself.
        backends, wanted = left["choices"], bench.order.requested
        fell_back = (part for part, one in backends.items() if one["observed"] != one["requested"])
        on_te = (part for part, one in backends.items() if one["observed"] == "te")
        other = sorted(fell_back if wanted == "te" else on_te)
        said = f"{len(backends)} parts; not on {wanted}: {', '.join(other) or 'none'}"
        bench.check(f"{run.name}.backends", bool(backends) and not other, said)
        if order.recipe is not None and order.seed == runs[0].order.seed:
            note_casts(bench, run, f"loss.{order.recipe}")
            bench.check(f"{run.name}.casts", bool(left["quantizers"]), f"{len(left['quantizers'])} casts were seen")
