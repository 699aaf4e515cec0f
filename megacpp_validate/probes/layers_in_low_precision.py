"""That each layer of a module computed in low precision: one that does not is in every bound, better than it should be.

While a step runs, each of its layers is watched: what it gets, what it gives, and the gradients of both. Then it runs
alone, on the same, outside of every scope. What it gave inside must differ by what the recipe rounds: a layer that the
scope does not reach gives the very same bits, and one whose backward pass it does not reach the same gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..evidence.receipt import Check, Part
from .bench import Bench
from .bounds import SAFETY
from .emulation import Product, Recipe, operand_roundings


@dataclass
class Watched:
    """One layer in a step; the last call counts.

    Attributes:
        rows, out: input and output; None before the first call.
        to_out, to_rows: their gradients.
    """

    layer: Any
    rows: Any = None
    out: Any = None
    to_out: Any = None
    to_rows: Any = None
    others: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@contextmanager
def watching_layers(layers: Mapping[str, Any]) -> Iterator[dict[str, Watched]]:
    """What these layers, by name, are given and give in the step that is run inside, forward and backward."""
    seen = {name: Watched(layer) for name, layer in layers.items()}
    handles = []
    for watched in seen.values():
        handles.append(watched.layer.register_forward_pre_hook(_before(watched), with_kwargs=True))
        handles.append(watched.layer.register_forward_hook(_after(watched)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _before(watched: Watched) -> Any:
    def hook(_: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        rows, *others = given
        watched.rows, watched.others, watched.options = rows.detach().clone(), tuple(others), dict(options)
        if not rows.requires_grad or not torch.is_grad_enabled():
            return None
        alone = rows.view_as(rows)  # its gradient is this layer's share; that of `rows` is of all that take them
        alone.register_hook(lambda gradient: setattr(watched, "to_rows", gradient.detach().clone()))
        return (alone, *others), options

    return hook


def _after(watched: Watched) -> Any:
    def hook(_: Any, _given: Any, given: Any) -> None:
        out = given[0] if isinstance(given, tuple) else given
        watched.out = out.detach().clone()
        if out.requires_grad:
            out.register_hook(lambda gradient: setattr(watched, "to_out", gradient.detach().clone()))

    return hook


def check_layers_in_low_precision(bench: Bench, name: str, recipe: Recipe, seen: Mapping[str, Watched]) -> None:
    """Each layer against itself outside of every scope: output, gradients of the input and of each weight.

    To be called outside of the scope and right after the step, whose gradients the weights still hold; it takes them
    away. The checks, `{name}.{layer}.layers`, are about which code ran and name the layer's class, as it has to be for
    `canary/dynamic` to know.

    Args:
        bench: where checks go.
        name: what comes before the layer's.
        recipe: the one that was on.
        seen: of `watching_layers`.
    """
    for place, watched in seen.items():
        kind = type(watched.layer).__name__
        if watched.out is None:
            bench.check(f"{name}.{place}.layers", False, f"not seen: {kind} was not called")
            continue
        parts = _parts(watched, recipe)
        bench.checks.append(Check(f"{name}.{place}.layers", all(part.passed for part in parts), tuple(parts), kind))


def _parts(watched: Watched, recipe: Recipe) -> list[Part]:
    layer, rows = watched.layer, watched.rows.requires_grad_()
    inside = {"forward": watched.out, "grad.input": watched.to_rows}
    weights = {part: weight for part, weight in layer.named_parameters() if weight.dim() > 1}
    inside |= {f"grad.{part}": weight.grad for part, weight in weights.items()}
    layer.zero_grad(set_to_none=True)
    given = layer(rows, *watched.others, **watched.options)
    out = given[0] if isinstance(given, tuple) else given
    if watched.to_out is not None:
        out.backward(watched.to_out)
    outside = {"forward": out.detach(), "grad.input": rows.grad}
    outside |= {f"grad.{part}": weight.grad for part, weight in weights.items()}
    count = rows.numel() // rows.shape[-1]
    lengths = {"forward": rows.shape[-1], "dgrad": out.shape[-1], "wgrad": count}
    made = []
    for part, tensor in inside.items():
        if tensor is None and outside[part] is None:
            continue
        product: Product = "forward" if part == "forward" else "dgrad" if part == "grad.input" else "wgrad"
        roundings = operand_roundings(recipe, product, lengths[product])
        floor, off = roundings.bound() / SAFETY / 2, _off(tensor, outside[part])
        why = f"half the error that the roundings must make: {roundings.why}"
        made.append(Part(part, off, floor, off >= floor, why, at_least=True))
    return made


def _off(seen: Any, wanted: Any) -> float:
    """How far apart two tensors are, relative to the second; NaN where one is not there, or there is nothing in it."""
    if seen is None or wanted is None or seen.shape != wanted.shape or not bool(wanted.any()):
        return float("nan")
    return float((seen.double() - wanted.double()).norm() / wanted.double().norm())
