"""The low-precision copy of a weight that a layer keeps between microbatches: made anew when it is told to, else taken.

Transformer Engine rounds a weight once a step where it is told which microbatch is the first (`is_first_microbatch` in
the documentation of `Linear`): True rounds and keeps, False takes what is kept, None rounds and keeps nothing. A copy
that is not made anew is that of the step before, and every value that comes of it is plausible.

Two equal layers take the same tensors in turn, in scopes of their own: one is told the microbatch, one never is. Their
amax histories are the same, weights are only turned round between steps, so amax values and scales are too, and so in
every recipe the same values come out. What is off by one step is as far off as another layer is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import torch

from ..evidence.receipt import Check, Part
from .bench import Bench
from .bounds import RMS_OF_ROUNDING, unit_roundoff
from .low_precision import Enter

MICROBATCH: Final = "is_first_microbatch"
Run = Callable[[Any, Any, bool | None], Any]

# The same values twice are the same bits. What is allowed is what cannot be another FP8 copy of any weight.
ALIKE: Final = RMS_OF_ROUNDING * unit_roundoff("e4m3") / 2
OTHER: Final = 0.5


def takes_microbatch(layer: Any) -> bool:
    """Whether the layer can be told the microbatch."""
    known = inspect.signature(layer.forward).parameters
    return MICROBATCH in known or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())


def run_layer(layer: Any, rows: Any, first: bool | None) -> Any:
    """Call a layer that takes its rows alone."""
    return layer(rows, is_first_microbatch=first)


def check_kept_weights(
    bench: Bench,
    name: str,
    layers: tuple[Any, Any],
    rows: Any,
    gradient: Any,
    enter: Enter,
    run: Run = run_layer,
) -> None:
    """Hold a layer that is told the microbatch to an equal one that is not: output and every gradient.

    Args:
        bench: where checks go: `{name}.renewed` and `{name}.kept`.
        name: of the checks, the recipe in it.
        layers: two of one kind, neither of which has run; the second takes the parameters of the first.
        rows: input of both.
        gradient: of the output.
        enter: the low-precision scope; forward passes run in it, backward passes outside.
        run: calls a layer on rows in a microbatch.
    """
    told, plain = layers
    with torch.no_grad():
        for own, other in zip(plain.parameters(), told.parameters(), strict=True):
            own.copy_(other)

    def step(layer: Any, first: bool | None, scope: Enter = enter) -> dict[str, Any]:
        layer.zero_grad(set_to_none=True)
        leaf = rows.detach().clone().requires_grad_()
        with scope():
            out = run(layer, leaf, first)
        out.backward(gradient)
        weights = {f"grad.{part}": weight.grad for part, weight in layer.named_parameters()}
        return {"forward": out.detach(), "grad.input": leaf.grad, **weights}

    step(told, True)
    before = step(plain, None)
    for layer in layers:
        _turn(layer)
    renewed, wanted = step(told, True), step(plain, None)
    _turn(told)  # nobody tells it: what is kept stays right
    kept, again = step(told, False), step(plain, None)
    outside = step(plain, None, nullcontext)
    low = [part for part, tensor in again.items() if tensor is not None and not _off(outside[part], tensor) <= ALIKE]
    if not low:
        said = "not judged: the scope changes nothing that it computes, so there is no copy to keep"
        bench.check(f"{name}.renewed", True, said)
        return
    other = _off(wanted["forward"], before["forward"])
    moved = Part("other-weights", other, OTHER, other >= OTHER, "the weights of the step before give others", True)
    bench.checks.append(_compared(f"{name}.renewed", renewed, wanted, low, moved))
    bench.checks.append(_compared(f"{name}.kept", kept, again, low))


def _turn(layer: Any) -> None:
    """Other weights of the same amax, in place as an optimizer changes them; once more brings them back."""
    with torch.no_grad():
        for weight in layer.parameters():
            if weight.dim() > 1:
                weight.copy_(weight.flip(-2, -1))


def _compared(name: str, seen: dict[str, Any], wanted: dict[str, Any], low: list[str], *more: Part) -> Check:
    why = f"half of what rounding one operand to FP8 changes ({RMS_OF_ROUNDING:.3f} x 2^-4): the same copy, same values"
    offs = {part: _off(seen[part], wanted[part]) for part in low}
    parts = (*(Part(part, off, ALIKE, off <= ALIKE, why) for part, off in offs.items()), *more)
    return Check(name, all(part.passed for part in parts), parts)


def _off(seen: Any, wanted: Any) -> float:
    """How far apart two tensors are, relative to the second; infinity where one is not there."""
    if seen is None or wanted is None or seen.shape != wanted.shape:
        return float("inf")
    if torch.equal(seen, wanted):
        return 0.0
    norm = wanted.double().norm()
    return float((seen.double() - wanted.double()).norm() / norm)
