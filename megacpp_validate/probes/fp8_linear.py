"""FP8 in one linear layer of Transformer Engine: that the recipe asked for is the recipe that ran.

An FP8 output that is too accurate did not run in FP8. So besides the bounds from above there is one from below, and the
values themselves are held to what plain torch gives under each recipe: with the right one they differ by the rounding
of the output only.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..evidence.receipt import Check, Part
from .bench import Bench
from .bounds import Roundings, compare
from .emulation import (
    BLOCKS,
    DTYPES,
    EMULATED,
    LARGEST,
    DelayedScales,
    Product,
    Recipe,
    emulated_linear,
    operand_roundings,
)
from .low_precision import Enter, low_precision_ran
from .observe import observed_backends
from .references.delayed_scaling import DelayedReference
from .references.linear import reference_linear

PRODUCTS: Final[dict[Product, str]] = {"forward": "out", "dgrad": "rows", "wgrad": "weight"}
# Largest value of an operand, times a power of two. Of a prime over 128, what a scale of 448 / amax makes of values in
# bf16 never lies halfway between two values of FP8: there a scale that is off by its last bit would round otherwise.
PEAK: Final = 251 / 128
PEAK_OF_THE_WARM_UP: Final = 2 * 241 / 128  # another, and no power of two apart: the scales round differently
STEPS: Final = (1.0, 3.0, 0.25)  # growing, then shrinking: the maximum of the history stays
# A scale is one division in fp32; a fast one may be off by two units in the last place.
SCALE_TOLERANCE: Final = 2.0**-21


@dataclass(frozen=True)
class _Case:
    """Operands of a linear layer: rows [R, K], weight [N, K], bias [N], gradient of the output [R, N]; bf16."""

    rows: Any
    weight: Any
    bias: Any
    gradient: Any

    @property
    def lengths(self) -> dict[Product, int]:
        """Products in a sum of each product."""
        return {"forward": self.rows.shape[1], "dgrad": self.weight.shape[0], "wgrad": self.rows.shape[0]}

    @property
    def smaller_operand(self) -> dict[Product, int]:
        """Values of the smaller operand of each product."""
        rows, weight, gradient = (tensor.numel() for tensor in (self.rows, self.weight, self.gradient))
        return {"forward": min(rows, weight), "dgrad": min(gradient, weight), "wgrad": min(gradient, rows)}


@dataclass(frozen=True)
class _Step:
    """What one forward and backward pass gave."""

    out: Any
    rows: Any
    weight: Any
    bias: Any


def _new_case(bench: Bench) -> _Case:
    """Multiples of 128, which every recipe takes; outputs of order 1."""
    rows, width, out = (128, 128, 128) if bench.quick or bench.device == "cpu" else (256, 512, 384)
    return _Case(
        rows=_with_peak(bench.randn(rows, width, dtype=torch.bfloat16), PEAK),
        weight=_with_peak(bench.randn(out, width, dtype=torch.bfloat16, scale=width**-0.5), PEAK),
        bias=bench.randn(out, dtype=torch.bfloat16, scale=0.5),
        gradient=_with_peak(bench.randn(rows, out, dtype=torch.bfloat16), PEAK),
    )


def _with_peak(tensor: Any, peak: float) -> Any:
    """The same with its first value replaced by `peak` times a power of two, so that it is the largest of all."""
    made, amax = tensor.clone(), _amax(tensor)
    made[0, 0] = peak * 2.0 ** math.ceil(math.log2(amax / PEAK))
    return made


def _new_layer(bench: Bench, case: _Case) -> Any:
    layer = bench.bridge().linear.require()(
        case.weight.shape[1], case.weight.shape[0], bias=True, params_dtype=torch.bfloat16, device=bench.device
    )
    with torch.no_grad():
        layer.weight.copy_(case.weight)
        layer.bias.copy_(case.bias)
    return layer


def _run(layer: Any, enter: Enter, rows: Any, gradient: Any) -> _Step:
    """Forward inside the scope, backward outside, as in training."""
    layer.zero_grad(set_to_none=True)
    leaf = rows.detach().clone().requires_grad_()
    with enter():
        out = layer(leaf)
    out.backward(gradient)
    return _Step(out, leaf.grad, layer.weight.grad, layer.bias.grad)


def _emulate(case: _Case, recipe: Recipe, scales: DelayedScales | None) -> _Step:
    rows, weight, bias = (tensor.detach().clone().requires_grad_() for tensor in (case.rows, case.weight, case.bias))
    out = emulated_linear(rows, weight, recipe, bias, scales=scales)
    out.backward(case.gradient)
    return _Step(out, rows.grad, weight.grad, bias.grad)


def _warm_up(tensor: Any) -> Any:
    return _with_peak(tensor, PEAK_OF_THE_WARM_UP)


def _amax(tensor: Any) -> float:
    return float(tensor.detach().abs().amax())


def is_judged(bench: Bench) -> bool:
    """Whether a linear layer can tell what a scope does: outside every scope it is right.

    Where it is not, the layer is at fault and not the scope: that is for the cell of `linear_walker` to say, which runs
    the same layer, and nothing is said of it here.
    """
    case = _new_case(bench)
    step = _run(_new_layer(bench, case), nullcontext, case.rows, case.gradient)
    wanted = reference_linear(case.rows, case.weight, case.bias, case.gradient)
    found = [
        compare(name, getattr(step, name), getattr(wanted, name), roundings=_in_bf16(length))
        for name, length in (*((PRODUCTS[which], case.lengths[which]) for which in PRODUCTS), ("bias", len(case.rows)))
    ]
    wrong = [check.name for check in found if not check.passed]
    if "te" not in observed_backends(step.out):
        wrong.append("backend")
    said = f"not judged: outside every scope the linear layer is wrong in {', '.join(wrong)}; see linear_walker"
    bench.check("fp8.layer", True, said if wrong else "the linear layer is right outside every scope")
    return not wrong


def check_recipe(bench: Bench, recipe: str, enter: Enter) -> None:
    """Forward and gradients of one layer under a recipe: in bounds, not too accurate, and with that recipe's values.

    Delayed scaling first runs a step on tensors with another amax, which its scales then come from; that tells it
    from current scaling.
    """
    case = _new_case(bench)
    layer = _new_layer(bench, case)
    _run(layer, enter, _warm_up(case.rows), _warm_up(case.gradient))
    step = _run(layer, enter, case.rows, case.gradient)
    with enter() as opened:
        choice = opened.choice
    bench.ran_on(f"fp8.{recipe}", choice, step.out)
    if recipe not in EMULATED:  # 4 bits with random transforms and stochastic rounding: no values to compare with
        bench.check(f"fp8.{recipe}.finite", all(bool(torch.isfinite(made).all()) for made in vars(step).values()))
        return
    scales = _delayed_scales(case) if recipe == "delayed" else None
    reference, native = reference_linear(*vars(case).values()), _emulate(case, recipe, scales)
    for which, tensor in PRODUCTS.items():
        wanted, seen, plain = (getattr(made, tensor) for made in (reference, step, native))
        roundings = operand_roundings(recipe, which, case.lengths[which], independent=case.smaller_operand[which])
        bench.compare(f"fp8.{recipe}.{which}", seen, wanted, roundings=roundings, native=plain)
        bench.checks.append(_applied(f"fp8.{recipe}.{which}.applied", seen, wanted, plain, roundings))
    bench.compare(f"fp8.{recipe}.bias", step.bias, reference.bias, roundings=_in_bf16(case.lengths["wgrad"]))
    if recipe in BLOCKS:
        _check_blocks(bench, layer, case, recipe, enter)


def _check_blocks(bench: Bench, layer: Any, case: _Case, recipe: Recipe, enter: Enter) -> None:
    """Scales that are powers of two give the same values whatever they span, but for what underflows beside them.

    So here the operands span 15 powers of two within 128 values, each the inverse of the other, and what underflows
    depends on the block: the values tell 1 x 128 and 128 x 128 from 1 x 32 and from a whole tensor.
    """
    column = torch.arange(case.rows.shape[1], device=case.rows.device)
    span = torch.exp2(-5.0 * (column // 32 % 4)).to(torch.bfloat16)
    rows, weight = case.rows * span, case.weight / span
    with torch.no_grad():
        layer.weight.copy_(weight)
    seen = _run(layer, enter, rows, case.gradient).out
    plain = emulated_linear(rows, weight, recipe, case.bias)
    rest = _beside_the_operands(operand_roundings(recipe, "forward", case.lengths["forward"]))
    part = _part("same-values", _distance(seen, plain, plain), rest)
    bench.checks.append(Check(f"fp8.{recipe}.blocks", part.passed, (part,)))


def _delayed_scales(case: _Case) -> DelayedScales:
    return DelayedScales(
        rows=LARGEST["e4m3"] / _amax(_warm_up(case.rows)),
        weight=LARGEST["e4m3"] / _amax(case.weight),
        gradient=LARGEST["e5m2"] / _amax(_warm_up(case.gradient)),
    )


def _in_bf16(k: int) -> Roundings:
    return Roundings((("bf16", 1),), k, why="the result rounded to bf16")


def _applied(name: str, seen: Any, wanted: Any, plain: Any, roundings: Roundings) -> Check:
    """That this recipe ran and no other, and that low precision ran at all."""
    if seen is None or seen.shape != wanted.shape:
        return Check(name, False, detail="there is no such tensor, or it has another shape")
    parts = (
        _part("same-values", _distance(seen, plain, wanted), _beside_the_operands(roundings)),
        low_precision_ran(_distance(seen, wanted, wanted), roundings),
    )
    return Check(name, all(part.passed for part in parts), parts)


def _beside_the_operands(roundings: Roundings) -> Roundings:
    """What may differ where both sides round the same operands: the accumulator, and each side's output."""
    steps = tuple((kind, 2 if kind == "bf16" else count) for kind, count in roundings.steps if kind not in DTYPES)
    why = "the operands are rounded alike; accumulator, and both outputs rounded to bf16"
    return Roundings(steps, roundings.sum_length, why=why)


def _distance(seen: Any, other: Any, wanted: Any) -> float:
    """How far apart two tensors are, relative to a third; NaN where one has a value that is none."""
    return float((seen.detach().double() - other.detach().double()).norm() / wanted.detach().double().norm())


def _part(name: str, observed: float, roundings: Roundings) -> Part:
    bound = roundings.bound()
    return Part(name, observed, bound, observed <= bound, roundings.derivation())


def check_high_precision(bench: Bench, low: Enter) -> None:
    """Outside of every scope, in the BF16 zone, and inside `high_precision`, a layer computes in bf16."""
    scope, case = bench.bridge("fp8_scope"), _new_case(bench)
    layer = _new_layer(bench, case)
    wanted = reference_linear(case.rows, case.weight, case.bias, case.gradient)
    zones = scope.Zones(3, first=1)

    def inside() -> AbstractContextManager[Any]:
        return scope.high_precision("a projection that stays")

    ways: dict[str, tuple[Enter, Enter]] = {
        "outside": (nullcontext, nullcontext),
        "zone": (nullcontext, lambda: scope.group_scope((0, 1), zones, (low, low))),
        "inside": (low, inside),
    }
    for name, (outer, inner) in ways.items():
        with outer():
            step = _run(layer, inner, case.rows, case.gradient)
        for which, tensor in PRODUCTS.items():
            roundings = _in_bf16(case.lengths[which])
            bench.compare(f"bf16.{name}.{which}", getattr(step, tensor), getattr(wanted, tensor), roundings=roundings)


def check_amax(bench: Bench, enter: Enter) -> None:
    """Under delayed scaling the history holds the amax of the very tensors, step by step, and scales follow it."""
    read, case = bench.bridge("fp8_scope").te_amax_state, _new_case(bench)
    layer = _new_layer(bench, case)
    states = {
        "input": (True, 0, DelayedReference(LARGEST["e4m3"])),
        "weight": (True, 1, DelayedReference(LARGEST["e4m3"])),
        "gradient": (False, 0, DelayedReference(LARGEST["e5m2"])),
    }
    for number, factor in enumerate(STEPS):
        rows, gradient = (tensor * factor for tensor in (case.rows, case.gradient))
        _run(layer, enter, rows, gradient)
        amax = {"input": _amax(rows), "weight": _amax(case.weight), "gradient": _amax(gradient)}
        for name, (forward, index, state) in states.items():
            state.end_step(amax[name])
            history, scale = read(layer, forward=forward)
            seen, seen_scale = history[:, index].tolist(), float(scale[index])
            bench.check(
                f"amax.step{number}.{name}.history",
                seen == state.history,
                f"seen {_shown(seen)}, wanted {_shown(state.history)}",
            )
            off = abs(seen_scale / state.scale - 1.0)
            part = Part(
                "scale",
                off,
                SCALE_TOLERANCE,
                off <= SCALE_TOLERANCE,
                "one division in fp32, off by two units in the last place",
            )
            bench.checks.append(Check(f"amax.step{number}.{name}.scale", part.passed, (part,)))


def _shown(history: list[float]) -> str:
    return ", ".join(f"{value:g}" for value in history if value) or "nothing"
