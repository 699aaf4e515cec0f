"""Delayed scaling saved in the middle of a run and loaded: what goes on is, bit by bit, what was never interrupted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from ..bench import Bench
from ..low_precision import Enter
from .saved_state import unpickling_allowed
from .scope_layers import ScopeLayer, new_layers

BEFORE: Final = (1.0, 16.0, 0.5)  # a spike in the history: its scales are not those of the next step
ELSEWHERE: Final = (0.25,)  # what the one that is loaded into went through
AFTER: Final = (2.0, 0.125)
WAYS: Final = {"forward": True, "backward": False}


def check_resumed(bench: Bench, enter: Enter, *, name: str) -> None:
    """Go on with layers of every kind, and with those that took over what they saved.

    The checks are `NAME.HOW.LAYER.loaded`, the state right after loading, `.step`, output and all gradients of the
    steps after it, and `.state`, histories and scales after them. HOW: "fresh" layers have never run, "used" ones have
    a state of their own, all of which is to be replaced.

    Args:
        bench: of the probe.
        enter: makes the scope of the recipe: delayed scaling.
        name: of the checks.
    """
    for how in ("fresh", "used"):
        layers, others = new_layers(bench), new_layers(bench)
        for factor in BEFORE:
            _step(bench, enter, [layers], factor)
        if how == "used":
            for factor in ELSEWHERE:
                _step(bench, enter, [others], factor)
        source, target = (torch.nn.ModuleList([one.module for one in row]) for row in (layers, others))
        saved = {key: value.clone() if hasattr(value, "clone") else value for key, value in source.state_dict().items()}
        with unpickling_allowed(os.environ):
            bench.bridge("recipe_state").load_fp8_state_dict(target, saved, recipe="delayed")
        read = bench.bridge("fp8_scope").te_amax_state
        for one, other in zip(layers, others, strict=True):
            _same(bench, f"{name}.{how}.{one.name}.loaded", *(list(_state(read, row.module)) for row in (one, other)))
        # Both in one scope: where it ends, every layer of the process is brought up to date.
        results = [_step(bench, enter, [layers, others], factor) for factor in AFTER]
        for index, (one, other) in enumerate(zip(layers, others, strict=True)):
            whole = [[tensor for result in results for tensor in result[row][index]] for row in (0, 1)]
            _same(bench, f"{name}.{how}.{one.name}.step", *whole)
            _same(bench, f"{name}.{how}.{one.name}.state", *(list(_state(read, row.module)) for row in (one, other)))


def _step(bench: Bench, enter: Enter, rows_of_layers: Sequence[Sequence[ScopeLayer]], factor: float) -> Any:
    """The same step of each row of layers, in one scope: output and gradients by row and layer."""
    given = [(one.rows(bench, factor), one.gradient(bench, factor)) for one in rows_of_layers[0]]
    leaves = [[rows.detach().clone().requires_grad_() for rows, _ in given] for _ in rows_of_layers]
    with enter():
        outs = [
            [one(leaf) for one, leaf in zip(layers, of_row, strict=True)]
            for layers, of_row in zip(rows_of_layers, leaves, strict=True)
        ]
    gradients = [gradient for _ in rows_of_layers for _, gradient in given]
    torch.autograd.backward([out for row in outs for out in row], gradients)
    found = [
        [
            [out.detach(), leaf.grad, *(weight.grad for weight in one.module.parameters())]
            for one, leaf, out in zip(*row, strict=True)
        ]
        for row in zip(rows_of_layers, leaves, outs, strict=True)
    ]
    for layers in rows_of_layers:
        for one in layers:
            one.module.zero_grad(set_to_none=True)
    return found


def _state(read: Callable[..., Any], module: Any) -> Iterator[Any]:
    """Histories and scales of both directions; nothing where the layer has none."""
    for way in WAYS.values():
        if ("scaling_fwd" if way else "scaling_bwd") in module.fp8_meta:
            yield from (tensor.detach().clone() for tensor in read(module, forward=way))


def _same(bench: Bench, name: str, wanted: Sequence[Any], seen: Sequence[Any]) -> None:
    off = [index for index, pair in enumerate(zip(wanted, seen, strict=False)) if not _equal(*pair)]
    right = len(wanted) == len(seen) and bool(wanted) and not off
    said = f"{len(off)} of {len(wanted)} tensors differ, {len(seen)} were seen; the first is number {off[:1]}"
    bench.check(name, right, f"{len(wanted)} tensors, bit by bit" if right else said)


def _equal(wanted: Any, seen: Any) -> bool:
    return wanted is not None and seen is not None and wanted.shape == seen.shape and torch.equal(wanted, seen)
