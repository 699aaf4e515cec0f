"""Recomputation of FP8 blocks: by Transformer Engine's checkpoint it changes nothing.

The same steps are taken with a checkpoint and without one: several micro-batches a step, weights that move. Outputs and
gradients then have the same bits, and each amax is taken in once: under delayed scaling the second forward pass takes
the scales of the first ("to ensure both forward steps are numerically same", `pytorch/quantization.py`, 2.12 to 2.20).
The refusals of torch's checkpoint, of second passes in another order and of a scope in a checkpoint are plain Python,
and so is what stays in high precision in a second pass: tests/bridge holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch

from ..bench import Bench, different
from ..observe import Enter
from .stacks import Seen, check_same_bits, new_batch, new_stack, train_step

WAYS: Final = {"reentrant": True, "not-reentrant": False}
FACTORS: Final = ((1.0, 3.0), (2.0, 0.5))  # of the micro-batches of each step: another amax each
DEPTH: Final = 2
COLUMNS: Final = {"forward": {"input": 0, "weight": 1}, "backward": {"gradient": 0}}


def probe(bench: Bench) -> None:
    """Whole blocks, in bf16 and in every recipe."""
    recipes = {recipe: bench.low_precision(recipe) for recipe in bench.require_recipes()}
    for name, enter in {"bf16": nullcontext, **recipes}.items():
        delayed = name == "delayed"
        with bench.scope(f"blocks.{name}.in-turn"):
            _check_blocks(bench, enter, delayed=delayed)
        if delayed:  # the others keep nothing of a pass: backward passes after all forward ones, as in a pipeline
            with bench.scope(f"blocks.{name}.late"):
                _check_blocks(bench, enter, delayed=True, late=True)


def _check_blocks(bench: Bench, enter: Enter, *, delayed: bool, late: bool = False) -> None:
    like = new_stack(bench, DEPTH)
    batches = [[new_batch(bench, factor) for factor in factors] for factors in FACTORS]
    passes = sum(map(len, batches))

    def run(around: Callable[[Any, Any], Any]) -> list[Seen]:
        stack = new_stack(bench, DEPTH, like=like)
        torch.manual_seed(bench.order.seed)
        bench.bridge("layer_watch").watch_layers(stack)
        return [train_step(bench, stack, enter, given, around=around, late=late, delayed=delayed) for given in batches]

    plain, again = run(_with_dropout), run(_with_dropout)
    check_same_bits(bench, "steady", plain, again, "grad")  # without a checkpoint, twice
    for way, reentrant in WAYS.items():
        calls: list[Any] = []
        try:
            seen = run(partial(_recomputed, bench, reentrant, calls))
        except Exception as fault:  # of the vendor's second pass: the other way is looked at all the same
            bench.check(f"{way}.grad", False, f"{type(fault).__name__}: {fault}"[:600])
            continue
        for what in ("forward", "grad"):
            check_same_bits(bench, f"{way}.{what}", plain, seen, what)
        wanted = 2 * DEPTH * passes
        bench.check(f"{way}.run-again", len(calls) == wanted, f"blocks ran {len(calls)} times, wanted {wanted}")
        if delayed:
            _check_history(bench, way, plain[-1]["state"], seen[-1]["state"], passes)


def _check_history(bench: Bench, way: str, plain: dict[str, Any], seen: dict[str, Any], calls: int) -> None:
    """Each call's amax once, in its order.

    Transformer Engine lets histories move on once more at the end of a second forward pass, with nothing new in them.
    Such rows do not count: they drop no amax here, and leave the scales as they are.
    """
    wrong = [f"{name}: another scale" for name in different(plain, seen) if name.endswith("scale")]
    for name in (name for name in plain if name.endswith("history")):
        for tensor, column in COLUMNS[name.split(".")[-2]].items():
            amaxes, kept = ([value for value in one[name][:, column].tolist() if value] for one in (seen, plain))
            if amaxes != kept or len(amaxes) != calls:
                wrong.append(f"{tensor} of {name}: {len(amaxes)} amaxes of {calls} calls, {len(kept)} without")
    bench.check(f"{way}.amax-once", not wrong, "; ".join(wrong[:3]) or f"{calls} amaxes of {calls} calls everywhere")


def _with_dropout(block: Any, rows: Any) -> Any:
    """The second pass must draw what the first one drew."""
    return torch.nn.functional.dropout(block(rows), 0.1)


def _recomputed(bench: Bench, reentrant: bool, calls: list[Any], block: Any, rows: Any) -> Any:
    def counted(given: Any) -> Any:
        calls.append(block)
        return _with_dropout(block, given)

    return bench.bridge("layer_watch").recompute(counted, rows, use_reentrant=reentrant)
