"""The low-precision scope as probes enter it, and what shows that something was computed in it.

The low-precision copy of a weight that a layer keeps between microbatches: made anew when it is told to, else taken.

Transformer Engine rounds a weight once a step where it is told which microbatch is the first (`is_first_microbatch` in
the documentation of `Linear`): True rounds and keeps, False takes what is kept, None rounds and keeps nothing. A copy
that is not made anew is that of the step before, and every value that comes of it is plausible.

Two equal layers take the same tensors in turn, in scopes of their own: one is told the microbatch, one never is. Their
amax histories are the same, weights are only turned round between steps, so amax values and scales are too, and so in
every recipe the same values come out. What is off by one step is as far off as another layer is.

That each layer of a module computed in low precision: one that does not is in every bound, better than it should be.

While a step runs, each of its layers is watched: what it gets, what it gives, and the gradients of both. Then it runs
alone, on the same, outside of every scope. What it gave inside must differ by what the recipe rounds: a layer that the
scope does not reach gives the very same bits, and one whose backward pass it does not reach the same gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch

from ..evidence.receipt import Part
from .bench import Bench
from .bounds import RMS_OF_ROUNDING, SAFETY, part, relative_error, unit_roundoff
from .emulation import Product, Recipe, operand_roundings
from .observe import Enter
from .trial import run_pass

# The same values twice are the same bits. What is allowed is what cannot be another FP8 copy of any weight.
ALIKE: Final = RMS_OF_ROUNDING * unit_roundoff("e4m3") / 2
OTHER: Final = 0.5
WHY: Final = (
    f"half of what rounding one operand to FP8 changes ({RMS_OF_ROUNDING:.3f} x 2^-4): the same copy, same values"
)


def check_kept_weights(
    bench: Bench, name: str, layers: tuple[Any, Any], rows: Any, gradient: Any, enter: Enter, *others: Any
) -> None:
    """Hold a layer that is told the microbatch to an equal one that is not: output and every gradient.

    Args:
        bench: where checks go: `{name}.renewed` and `{name}.kept`.
        name: of the checks, the recipe in it.
        layers: two of one kind, neither of which has run; the second takes the parameters of the first.
        rows: input of both.
        gradient: of the output.
        enter: the low-precision scope; forward passes run in it, backward passes outside.
        others: what the layers take after their rows.
    """
    told, plain = layers
    with torch.no_grad():
        for own, other in zip(plain.parameters(), told.parameters(), strict=True):
            own.copy_(other)

    def step(layer: Any, first: bool | None, scope: Enter = enter) -> dict[str, Any]:
        leaf = rows.detach().clone().requires_grad_()
        leaves = {"input": leaf, **dict(layer.named_parameters())}
        seen = run_pass(lambda: layer(leaf, *others, is_first_microbatch=first), leaves, gradient, scope)
        return {**seen, "forward": seen["forward"].detach()}

    step(told, True)
    before = step(plain, None)
    for layer in layers:
        _turn(layer)
    renewed, wanted = step(told, True), step(plain, None)
    _turn(told)  # nobody tells it: what is kept stays right
    kept, again = step(told, False), step(plain, None)
    outside = step(plain, None, nullcontext)
    low = [name for name, tensor in again.items() if tensor is not None and not _off(outside[name], tensor) <= ALIKE]
    if not low:
        said = "not judged: the scope changes nothing that it computes, so there is no copy to keep"
        bench.check(f"{name}.renewed", True, said)
        return
    other = _off(wanted["forward"], before["forward"])
    moved = part("other-weights", other, OTHER, "the weights of the step before give others", at_least=True)
    for kind, seen, right, more in (("renewed", renewed, wanted, (moved,)), ("kept", kept, again, ())):
        parts = [part(tensor, _off(seen[tensor], right[tensor]), ALIKE, WHY) for tensor in low]
        bench.check_parts(f"{name}.{kind}", *parts, *more)


def _turn(layer: Any) -> None:
    """Other weights of the same amax, in place as an optimizer changes them; once more brings them back."""
    with torch.no_grad():
        for weight in layer.parameters():
            if weight.dim() > 1:
                weight.copy_(weight.flip(-2, -1))


def _off(seen: Any, wanted: Any, lost: float = math.inf) -> float:
    """How far apart two tensors are, relative to the second.

    Args:
        seen, wanted: the same shape; None where there is none.
        lost: the answer where one is missing, or where the second holds nothing but zeros. Two zeros, as gradients of
            an idle expert are, are the same unless `lost` is NaN.
    """
    if seen is None or wanted is None or seen.shape != wanted.shape:
        return lost
    if not bool(wanted.any()):
        return lost if math.isnan(lost) or bool(seen.any()) else 0.0
    return relative_error(seen, wanted)


class Watched:
    """One layer in a step; the last call counts.

    Attributes:
        layer: that is watched, until its hooks are removed.
        rows, out: input and output; None before the first call.
        to_out, to_rows: their gradients.
        others, options: of the call.
    """

    rows: Any = None
    out: Any = None
    to_out: Any = None
    to_rows: Any = None

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.others: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}
        before = layer.register_forward_pre_hook(self._before, with_kwargs=True)
        self.hooks = before, layer.register_forward_hook(self._after)

    def _before(self, _: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        rows, *others = given
        self.rows, self.others, self.options = rows.detach().clone(), tuple(others), dict(options)
        if not rows.requires_grad or not torch.is_grad_enabled():
            return None
        alone = rows.view_as(rows)  # its gradient is this layer's share; that of `rows` is of all that take them
        alone.register_hook(lambda gradient: setattr(self, "to_rows", gradient.detach().clone()))
        return (alone, *others), options

    def _after(self, _: Any, _given: Any, given: Any) -> None:
        out = given[0] if isinstance(given, tuple) else given
        self.out = out.detach().clone()
        if out.requires_grad:
            out.register_hook(lambda gradient: setattr(self, "to_out", gradient.detach().clone()))


@contextmanager
def watching_layers(layers: Mapping[str, Any]) -> Iterator[dict[str, Watched]]:
    """What these layers, by name, are given and give in the step that is run inside, forward and backward."""
    seen = {name: Watched(layer) for name, layer in layers.items()}
    try:
        yield seen
    finally:
        for hook in (hook for watched in seen.values() for hook in watched.hooks):
            hook.remove()


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
        bench.check_parts(f"{name}.{place}.layers", *_parts(watched, recipe), detail=kind)


def _parts(watched: Watched, recipe: Recipe) -> list[Part]:
    inside, outside = run_alone(watched)
    rows, out = watched.rows, watched.out
    lengths = {"forward": rows.shape[-1], "dgrad": out.shape[-1], "wgrad": rows.numel() // rows.shape[-1]}
    made = []
    for name, tensor in inside.items():
        if tensor is None and outside[name] is None:
            continue
        product: Product = "forward" if name == "forward" else "dgrad" if name == "grad.input" else "wgrad"
        roundings = operand_roundings(recipe, product, lengths[product])
        floor, off = roundings.bound() / SAFETY / 2, _off(tensor, outside[name], math.nan)  # a lost one is no fallback
        why = f"half the error that the roundings must make: {roundings.why}"
        made.append(part(name, off, floor, why, at_least=True))
    return made


def run_alone(watched: Watched, *, weights_alone: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the layer gave in the step, and what it gives alone on the same, outside of every scope: output, gradients.

    Args:
        watched: to be called right after the step, whose gradients the weights still hold; it takes them away.
        weights_alone: without the gradients of norms and biases.
    """
    layer, rows = watched.layer, watched.rows.requires_grad_()
    named = [(part, one) for part, one in layer.named_parameters() if one.dim() > 1 or not weights_alone]
    inside = {"forward": watched.out, "grad.input": watched.to_rows}
    inside |= {f"grad.{part}": one.grad for part, one in named}
    layer.zero_grad(set_to_none=True)
    given = layer(rows, *watched.others, **watched.options)
    out = given[0] if isinstance(given, tuple) else given
    if watched.to_out is not None:
        out.backward(watched.to_out)
    outside = {"forward": out.detach(), "grad.input": rows.grad}
    return inside, outside | {f"grad.{part}": one.grad for part, one in named}
