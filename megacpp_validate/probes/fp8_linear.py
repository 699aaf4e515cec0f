"""FP8 in one linear layer of Transformer Engine: that the recipe asked for is the recipe that ran.

An FP8 output that is too accurate did not run in FP8. So besides the bounds from above there is one from below, and the
values themselves are held to what plain torch gives under each recipe: with the right one they differ by the rounding
of the output only.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from ..evidence.receipt import Part
from .bench import Bench
from .bounds import Roundings, low_precision_ran, part, relative_error
from .emulation import (
    BLOCKS,
    LARGEST,
    DelayedScales,
    FormatName,
    Product,
    Recipe,
    emulated_linear,
    new_state,
    next_state,
    operand_roundings,
)  # fmt: skip
from .observe import Enter, observed_backends
from .references import linear
from .trial import Tensors, formula_pass, reference_pass, run_pass

PRODUCTS: Final[dict[Product, str]] = {"forward": "forward", "dgrad": "grad.input", "wgrad": "grad.weight"}
# Largest value of an operand, times a power of two. Of a prime over 128, what a scale of 448 / amax makes of values in
# bf16 never lies halfway between two values of FP8: there a scale that is off by its last bit would round otherwise.
PEAK: Final = 251 / 128
PEAK_OF_THE_WARM_UP: Final = 2 * 241 / 128  # another, and no power of two apart: the scales round differently
STEPS: Final = (1.0, 3.0, 0.25)  # growing, then shrinking: the maximum of the history stays
CALLS: Final = 5  # outside of every scope: a fault of every fifth call is the layer's as well
# A scale is one division in fp32; a fast one may be off by two units in the last place.
SCALE_TOLERANCE: Final = 2.0**-21
# Tensor -> whether its state is the forward one, its column there, and its format.
STATES: Final[dict[str, tuple[bool, int, FormatName]]] = {
    "input": (True, 0, "e4m3"), "weight": (True, 1, "e4m3"), "gradient": (False, 0, "e5m2")
}  # fmt: skip


class _Case(NamedTuple):
    """bf16 operands of a linear layer, "input" [R, K], "weight" [N, K], "bias" [N]; gradient of the output [R, N]."""

    operands: dict[str, Any]
    gradient: Any

    def sizes(self, product: Product) -> tuple[int, int]:
        """Products in a sum, and values of the smaller operand."""
        (rows, width), out = self.operands["input"].shape, self.gradient.shape[1]
        sizes = {"forward": (width, rows, out), "dgrad": (out, rows, width), "wgrad": (rows, width, out)}
        length, *others = sizes[product]
        return length, length * min(others)

    def exact(self) -> dict[str, Any]:
        """The pass in fp64."""
        return reference_pass(linear, self.operands, self.gradient)[0]


def _new_case(bench: Bench) -> _Case:
    """Multiples of 128, which every recipe takes; outputs of order 1."""
    rows, width, out = (128, 128, 128) if bench.quick or bench.device == "cpu" else (256, 512, 384)
    operands = {
        "input": _with_peak(bench.randn(rows, width, dtype=torch.bfloat16)),
        "weight": _with_peak(bench.randn(out, width, dtype=torch.bfloat16, scale=width**-0.5)),
        "bias": bench.randn(out, dtype=torch.bfloat16, scale=0.5),
    }
    return _Case(operands, _with_peak(bench.randn(rows, out, dtype=torch.bfloat16)))


def _with_peak(tensor: Any, peak: float = PEAK) -> Any:
    """The same with its first value replaced by `peak` times a power of two, so that it is the largest of all."""
    made = tensor.clone()
    made[0, 0] = peak * 2.0 ** math.ceil(math.log2(_amax(tensor) / PEAK))
    return made


_warm_up: Final = partial(_with_peak, peak=PEAK_OF_THE_WARM_UP)


def _new_layer(bench: Bench, case: _Case) -> Any:
    out, width = case.operands["weight"].shape
    layer = bench.te_layer("linear", width, out, bias=True)
    with torch.no_grad():
        for name in ("weight", "bias"):
            getattr(layer, name).copy_(case.operands[name])
    return layer


def _run(layer: Any, enter: Enter, rows: Any, gradient: Any) -> dict[str, Any]:
    """Forward inside the scope, backward outside, as in training."""
    leaves = {"input": rows.detach().clone().requires_grad_(), "weight": layer.weight, "bias": layer.bias}
    return run_pass(lambda: layer(leaves["input"]), leaves, gradient, enter)


def _amax(tensor: Any) -> float:
    return float(tensor.detach().abs().amax())


def is_judged(bench: Bench) -> bool:
    """Whether a linear layer shows what a scope does: outside every scope it is right.

    Where it is not, the layer is at fault and not the scope: that is for the cell of `linear_walker` to say, which runs
    the same layer, and nothing is said of it here.
    """
    case = _new_case(bench)
    layer, wanted = _new_layer(bench, case), case.exact()
    lengths = {tensor: case.sizes(which)[0] for which, tensor in PRODUCTS.items()} | {"grad.bias": len(case.gradient)}
    looked_at = Bench(bench.order)  # whose checks are not the cell's
    for _ in range(CALLS):
        step = _run(layer, nullcontext, case.operands["input"], case.gradient)
        looked_at.compare_pass(step, wanted, lambda name: Roundings((("bf16", 1),), lengths[name], why="rounded once"))
    wrong = list(dict.fromkeys(check.name for check in looked_at.checks if not check.passed))
    if "te" not in observed_backends(step["forward"]):
        wrong.append("backend")
    said = f"not judged: outside every scope the linear layer is wrong in {', '.join(wrong)}; see linear_walker"
    bench.check("fp8.layer", True, said if wrong else "the linear layer is right outside every scope")
    return not wrong


def check_recipe(bench: Bench, recipe: Recipe, enter: Enter) -> None:
    """Forward and gradients of one layer under a recipe: in bounds, not too accurate, and with that recipe's values.

    Delayed scaling first runs a step on tensors with another amax, which its scales then come from; that tells it
    from current scaling.
    """
    case = _new_case(bench)
    layer, rows, weight = _new_layer(bench, case), case.operands["input"], case.operands["weight"]
    _run(layer, enter, _warm_up(rows), _warm_up(case.gradient))
    step = _run(layer, enter, rows, case.gradient)
    with enter() as opened:
        bench.ran_on(f"fp8.{recipe}", opened.choice, step["forward"])
    narrow, wide = LARGEST["e4m3"], LARGEST["e5m2"]
    scales = DelayedScales(
        narrow / _amax(_warm_up(rows)), narrow / _amax(weight), wide / _amax(_warm_up(case.gradient))
    )

    def emulated(given: Tensors) -> Any:
        return emulated_linear(given["input"], given["weight"], recipe, given["bias"], scales=scales)

    wanted, native = case.exact(), formula_pass(emulated, case.operands, case.gradient)
    for which, tensor in PRODUCTS.items():
        length, independent = case.sizes(which)
        roundings = operand_roundings(recipe, which, length, independent=independent)
        right, seen, plain, name = wanted[tensor], step[tensor], native[tensor], f"fp8.{recipe}.{which}"
        bench.compare(name, seen, right, roundings=roundings, native=plain)
        if seen is None or seen.shape != right.shape:
            bench.check(f"{name}.applied", False, "there is no such tensor, or it has another shape")
            continue
        parts = [low_precision_ran(relative_error(seen, right), roundings)]
        if recipe != "nvfp4" or which == "forward":  # two stochastic roundings of a gradient differ
            parts.insert(0, _same_values(seen, plain, right, roundings))
        bench.check_parts(f"{name}.applied", *parts)
    if recipe in BLOCKS:
        _check_blocks(bench, layer, case, recipe, enter)


def _check_blocks(bench: Bench, layer: Any, case: _Case, recipe: Recipe, enter: Enter) -> None:
    """Scales that are powers of two give the same values whatever they span, but for what underflows beside them.

    So here the operands span 15 powers of two within 128 values, each the inverse of the other, and what underflows
    depends on the block: the values tell 1 x 128 and 128 x 128 from 1 x 32 and from a whole tensor.
    """
    column = torch.arange(case.operands["input"].shape[1], device=case.gradient.device)
    span = torch.exp2(-5.0 * (column // 32 % 4)).to(torch.bfloat16)
    rows, weight = case.operands["input"] * span, case.operands["weight"] / span
    with torch.no_grad():
        layer.weight.copy_(weight)
    seen = _run(layer, enter, rows, case.gradient)["forward"]
    plain = emulated_linear(rows, weight, recipe, case.operands["bias"])
    same = _same_values(seen, plain, plain, operand_roundings(recipe, "forward", rows.shape[1]))
    bench.check_parts(f"fp8.{recipe}.blocks", same)


def _same_values(seen: Any, plain: Any, wanted: Any, roundings: Roundings) -> Part:
    """Both sides round the same operands: what may differ is the accumulator, and each side's output."""
    steps = tuple((kind, 2 if kind == "bf16" else count) for kind, count in roundings.steps if kind not in LARGEST)
    why = "the operands are rounded alike; accumulator, and both outputs rounded to bf16"
    rest = Roundings(steps, roundings.sum_length, why=why)
    off = float((seen.detach().double() - plain.detach().double()).norm() / wanted.detach().double().norm())
    return part("same-values", off, rest.bound(), rest.derivation())


def check_amax(bench: Bench) -> None:
    """Under delayed scaling the history holds the amax of the very tensors, step by step, and scales follow it."""
    read, case, enter = bench.bridge("fp8_scope").te_amax_state, _new_case(bench), bench.low_precision("delayed")
    layer, states = _new_layer(bench, case), dict.fromkeys(STATES, new_state(16, 1))
    for number, factor in enumerate(STEPS):
        rows, gradient = (tensor * factor for tensor in (case.operands["input"], case.gradient))
        _run(layer, enter, rows, gradient)
        given = {"input": rows, "weight": case.operands["weight"], "gradient": gradient}
        for name, (forward, column, kind) in STATES.items():
            where, amax = f"amax.step{number}.{name}", torch.tensor([_amax(given[name])])
            state = states[name] = next_state(states[name], amax, LARGEST[kind], "python")
            found, scale = read(layer, forward=forward)
            seen, history = found[:, column].tolist(), state.history[:, 0].tolist()
            bench.check(f"{where}.history", seen == history, f"seen {_shown(seen)}, wanted {_shown(history)}")
            off = abs(float(scale[column]) / float(state.scale[0]) - 1.0)
            why = "one division in fp32, off by two units in the last place"
            bench.check_parts(f"{where}.scale", part("scale", off, SCALE_TOLERANCE, why))


def _shown(history: list[float]) -> str:
    return ", ".join(f"{value:g}" for value in history if value) or "nothing"
