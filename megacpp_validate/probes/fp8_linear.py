"""FP8 in one linear layer of Transformer Engine: that the recipe asked for is the recipe that ran.

An FP8 output that is too accurate did not run in FP8. So besides the bounds from above there is one from below, and the
values themselves are held to what plain torch gives under each recipe: with the right one they differ by the rounding
of the output only.

Recomputation by the vendor's checkpoint: what it gives is what the same layers give without it, to the bit.

Transformer Engine promises that: under delayed scaling the second forward pass takes the scales of the first ("to
ensure both forward steps are numerically same", `pytorch/quantization.py`, 2.12 to 2.20). So layers with a checkpoint
are held to the very same layers without one, wherever these give the same bits twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
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
from .low_precision import low_precision_ran
from .memory import Enter
from .observe import observed_backends
from .references.delayed_scaling import DelayedRule, new_state, next_state
from .references.layers import linear
from .trial import Tensors, formula_pass, reference_pass, run_pass

PRODUCTS: Final[dict[Product, str]] = {"forward": "forward", "dgrad": "grad.input", "wgrad": "grad.weight"}
# Largest value of an operand, times a power of two. Of a prime over 128, what a scale of 448 / amax makes of values in
# bf16 never lies halfway between two values of FP8: there a scale that is off by its last bit would round otherwise.
PEAK: Final = 251 / 128
PEAK_OF_THE_WARM_UP: Final = 2 * 241 / 128  # another, and no power of two apart: the scales round differently
STEPS: Final = (1.0, 3.0, 0.25)  # growing, then shrinking: the maximum of the history stays
# A scale is one division in fp32; a fast one may be off by two units in the last place.
SCALE_TOLERANCE: Final = 2.0**-21


@dataclass(frozen=True)
class _Case:
    """bf16 operands of a linear layer, "input" [R, K], "weight" [N, K], "bias" [N]; gradient of the output [R, N]."""

    operands: dict[str, Any]
    gradient: Any

    def lengths(self, product: Product) -> int:
        """Products in a sum."""
        rows, weight = self.operands["input"], self.operands["weight"]
        return {"forward": rows.shape[1], "dgrad": weight.shape[0], "wgrad": rows.shape[0]}[product]

    def smaller_operand(self, product: Product) -> int:
        """Values of the smaller operand."""
        rows, weight, gradient = (one.numel() for one in (*list(self.operands.values())[:2], self.gradient))
        return {"forward": min(rows, weight), "dgrad": min(gradient, weight), "wgrad": min(gradient, rows)}[product]


def _new_case(bench: Bench) -> _Case:
    """Multiples of 128, which every recipe takes; outputs of order 1."""
    rows, width, out = (128, 128, 128) if bench.quick or bench.device == "cpu" else (256, 512, 384)
    operands = {
        "input": _with_peak(bench.randn(rows, width, dtype=torch.bfloat16), PEAK),
        "weight": _with_peak(bench.randn(out, width, dtype=torch.bfloat16, scale=width**-0.5), PEAK),
        "bias": bench.randn(out, dtype=torch.bfloat16, scale=0.5),
    }
    return _Case(operands, _with_peak(bench.randn(rows, out, dtype=torch.bfloat16), PEAK))


def _with_peak(tensor: Any, peak: float) -> Any:
    """The same with its first value replaced by `peak` times a power of two, so that it is the largest of all."""
    made, amax = tensor.clone(), _amax(tensor)
    made[0, 0] = peak * 2.0 ** math.ceil(math.log2(amax / PEAK))
    return made


def _new_layer(bench: Bench, case: _Case) -> Any:
    out, width = case.operands["weight"].shape
    layer = bench.bridge().linear.require()(width, out, bias=True, params_dtype=torch.bfloat16, device=bench.device)
    with torch.no_grad():
        for name in ("weight", "bias"):
            getattr(layer, name).copy_(case.operands[name])
    return layer


def _run(layer: Any, enter: Enter, rows: Any, gradient: Any) -> dict[str, Any]:
    """Forward inside the scope, backward outside, as in training."""
    leaves = {"input": rows.detach().clone().requires_grad_(), "weight": layer.weight, "bias": layer.bias}
    return run_pass(lambda: layer(leaves["input"]), leaves, gradient, enter)


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
    step = _run(_new_layer(bench, case), nullcontext, case.operands["input"], case.gradient)
    wanted, _ = reference_pass(linear, case.operands, case.gradient)
    lengths = {**{tensor: case.lengths(which) for which, tensor in PRODUCTS.items()}, "grad.bias": len(case.gradient)}
    found = [compare(name, step[name], wanted[name], roundings=_in_bf16(length)) for name, length in lengths.items()]
    wrong = [check.name for check in found if not check.passed]
    if "te" not in observed_backends(step["forward"]):
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
    layer, rows = _new_layer(bench, case), case.operands["input"]
    _run(layer, enter, _warm_up(rows), _warm_up(case.gradient))
    step = _run(layer, enter, rows, case.gradient)
    with enter() as opened:
        choice = opened.choice
    bench.ran_on(f"fp8.{recipe}", choice, step["forward"])
    if recipe not in EMULATED:  # 4 bits with random transforms and stochastic rounding: no values to compare with
        bench.check(f"fp8.{recipe}.finite", all(bool(torch.isfinite(made).all()) for made in step.values()))
        return
    scales = _delayed_scales(case) if recipe == "delayed" else None
    wanted, _ = reference_pass(linear, case.operands, case.gradient)
    native = formula_pass(partial(_emulated, recipe=recipe, scales=scales), case.operands, case.gradient)
    for which, tensor in PRODUCTS.items():
        roundings = operand_roundings(recipe, which, case.lengths(which), independent=case.smaller_operand(which))
        right, seen, plain = wanted[tensor], step[tensor], native[tensor]
        bench.compare(f"fp8.{recipe}.{which}", seen, right, roundings=roundings, native=plain)
        bench.checks.append(_applied(f"fp8.{recipe}.{which}.applied", seen, right, plain, roundings))
    bias = _in_bf16(case.lengths("wgrad"))
    bench.compare(f"fp8.{recipe}.bias", step["grad.bias"], wanted["grad.bias"], roundings=bias)
    if recipe in BLOCKS:
        _check_blocks(bench, layer, case, recipe, enter)


def _emulated(given: Tensors, *, recipe: Recipe, scales: DelayedScales | None) -> Any:
    return emulated_linear(given["input"], given["weight"], recipe, given["bias"], scales=scales)


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
    rest = _beside_the_operands(operand_roundings(recipe, "forward", case.lengths("forward")))
    part = _part("same-values", _distance(seen, plain, plain), rest)
    bench.checks.append(Check(f"fp8.{recipe}.blocks", part.passed, (part,)))


def _delayed_scales(case: _Case) -> DelayedScales:
    return DelayedScales(
        rows=LARGEST["e4m3"] / _amax(_warm_up(case.operands["input"])),
        weight=LARGEST["e4m3"] / _amax(case.operands["weight"]),
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
    wanted, _ = reference_pass(linear, case.operands, case.gradient)
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
            step = _run(layer, inner, case.operands["input"], case.gradient)
        for which, tensor in PRODUCTS.items():
            bench.compare(f"bf16.{name}.{which}", step[tensor], wanted[tensor], roundings=_in_bf16(case.lengths(which)))


def check_amax(bench: Bench, enter: Enter) -> None:
    """Under delayed scaling the history holds the amax of the very tensors, step by step, and scales follow it."""
    read, case = bench.bridge("fp8_scope").te_amax_state, _new_case(bench)
    layer = _new_layer(bench, case)
    formats = {"input": (True, 0, "e4m3"), "weight": (True, 1, "e4m3"), "gradient": (False, 0, "e5m2")}
    states = dict.fromkeys(formats, new_state(16, 1))
    for number, factor in enumerate(STEPS):
        rows, gradient = (tensor * factor for tensor in (case.operands["input"], case.gradient))
        _run(layer, enter, rows, gradient)
        amax = {"input": rows, "weight": case.operands["weight"], "gradient": gradient}
        for name, (forward, index, kind) in formats.items():
            newest = torch.tensor([_amax(amax[name])])
            state = next_state(states[name], newest, DelayedRule(LARGEST[kind], "python"))  # type: ignore[index]
            states[name], history = state, state.history[:, 0].tolist()
            found, scale = read(layer, forward=forward)
            seen, seen_scale = found[:, index].tolist(), float(scale[index])
            said = f"seen {_shown(seen)}, wanted {_shown(history)}"
            bench.check(f"amax.step{number}.{name}.history", seen == history, said)
            off = abs(seen_scale / float(state.scale[0]) - 1.0)
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


WAYS: Final = {"reentrant": True, "not-reentrant": False}
RECOMPUTED_STEPS: Final = (1.0, 3.0)  # another amax each step, so that scales of delayed scaling move between them
GRADIENTS: Final[tuple[tuple[str, Product], ...]] = (
    ("rows", "dgrad"), ("first.weight", "wgrad"), ("second.weight", "wgrad"),
)  # fmt: skip


@dataclass(frozen=True)
class _Sample:
    """Rows [R, K], weights [N, K] and [K, N] of two layers, gradient of the output [R, K]; bf16."""

    rows: Any
    weights: tuple[Any, Any]
    gradient: Any


@dataclass(frozen=True)
class _Seen:
    """What some steps gave.

    Attributes:
        outs: of each step.
        grads: of each step, by name.
        history: by layer and tensor, the amax values that delayed scaling remembers, in their order, and its scale.
    """

    outs: tuple[Any, ...]
    grads: tuple[dict[str, Any], ...]
    history: dict[str, tuple[tuple[float, ...], float]]


def check_recompute(bench: Bench, recipes: Mapping[Any, Enter]) -> None:
    """Both kinds of checkpoint, in bf16 and in every recipe.

    Args:
        bench: its checks so far tell which recipes the layer itself is right in: no others are judged here.
        recipes: the scope of each.
    """
    if bench.bridge().checkpoint() is None:  # the check of the accessor has said so
        return
    sample = _new_sample(bench)
    for name, enter in {"bf16": nullcontext, **{f"fp8.{recipe}": enter for recipe, enter in recipes.items()}}.items():
        about = (f"{name}.", "amax.") if name == "fp8.delayed" else (f"{name}.",)
        if wrong := next((c.name for c in bench.checks if not c.passed and c.name.startswith(about)), ""):
            bench.check(f"recompute.{name}.judged", True, f"not judged: without it {wrong} fails already")
            continue
        delayed = name == "fp8.delayed"
        plain, again = (_run_steps(bench, sample, enter, delayed=delayed) for _ in range(2))
        without_grad = _first_out(bench, sample, enter)
        steady_out = _same(plain.outs, again.outs) and torch.equal(plain.outs[0], without_grad)
        steady = {key for key in plain.grads[0] if _same(_of(plain, key), _of(again, key))}
        for way, reentrant in WAYS.items():
            seen = _run_steps(bench, sample, enter, reentrant=reentrant, delayed=delayed)
            with bench.scope(f"recompute.{name}.{way}"):
                _compare(bench, seen, plain, steady, steady_out=steady_out)
                if name != "bf16" and name.removeprefix("fp8.") in EMULATED:
                    bench.checks.append(_ran_low(sample, seen, name.removeprefix("fp8.")))  # type: ignore[arg-type]


def _compare(bench: Bench, seen: _Seen, plain: _Seen, steady: set[str], *, steady_out: bool) -> None:
    """To the bit, but for what differs without a checkpoint as well."""
    if steady_out:
        kept = _same(plain.outs, seen.outs)
        bench.check("forward", kept, f"{'the same' if kept else 'other'} bits, with a checkpoint and without one")
    names = [name for name in plain.grads[0] if name in steady]
    different = [name for name in names if not _same(_of(plain, name), _of(seen, name))]
    left_out = f"; not steady by itself: {', '.join(sorted(set(plain.grads[0]) - steady))}"
    said = f"other bits than without a checkpoint: {', '.join(different)}" if different else "the same bits"
    bench.check("grad", not different, said + (left_out if len(names) < len(plain.grads[0]) else ""))
    if plain.history:
        moved = [f"{name}: {seen.history[name]}, not {kept}" for name, kept in plain.history.items()
                 if seen.history[name] != kept]  # fmt: skip
        bench.check("history", not moved, "; ".join(moved) or "each amax is remembered once, and the scales are those")


def _ran_low(sample: _Sample, seen: _Seen, recipe: Recipe) -> Check:
    """That the second forward pass and its gradients ran in low precision: too accurate a gradient did not."""
    rows, weights = sample.rows.double() * RECOMPUTED_STEPS[-1], [weight.double() for weight in sample.weights]
    gradient = sample.gradient.double() * RECOMPUTED_STEPS[-1]
    back = gradient @ weights[1]
    between = rows @ weights[0].T
    wanted = {"rows": back @ weights[0], "first.weight": back.T @ rows, "second.weight": gradient.T @ between}
    lengths = {"dgrad": weights[0].shape[0], "wgrad": rows.shape[0]}
    parts = []
    for name, which in GRADIENTS:
        grad = seen.grads[-1][name]
        error = 0.0 if grad is None else float((grad.double() - wanted[name]).norm() / wanted[name].norm())
        last = operand_roundings(recipe, which, lengths[which])
        parts.append(low_precision_ran(error, last, f"gradient of {name}, of its last product alone"))
    return Check("grad.applied", all(part.passed for part in parts), tuple(parts))


# --- runs -------------------------------------------------------------------------------------------------


def _new_sample(bench: Bench) -> _Sample:
    """Multiples of 128, which every recipe takes; outputs of order 1."""
    rows, width, inner = (128, 128, 128) if bench.quick or bench.device == "cpu" else (256, 512, 384)
    made = {"dtype": torch.bfloat16}
    return _Sample(
        bench.randn(rows, width, **made),
        (bench.randn(inner, width, scale=width**-0.5, **made), bench.randn(width, inner, scale=inner**-0.5, **made)),
        bench.randn(rows, width, **made),
    )


def _new_layers(bench: Bench, sample: _Sample) -> tuple[Any, Any]:
    """Two layers, one after the other, with no state yet."""
    made = []
    for weight in sample.weights:
        layer = bench.bridge().linear.require()(
            weight.shape[1], weight.shape[0], bias=False, params_dtype=torch.bfloat16, device=bench.device
        )
        with torch.no_grad():
            layer.weight.copy_(weight)
        made.append(layer)
    return made[0], made[1]


def _run_steps(
    bench: Bench, sample: _Sample, enter: Enter, *, reentrant: bool | None = None, delayed: bool = False
) -> _Seen:
    """Some steps of fresh layers, with a checkpoint around both of them or (`reentrant` None) without one."""
    first, second = _new_layers(bench, sample)
    scope = bench.bridge("fp8_scope")

    def both(rows: Any) -> Any:
        return second(first(rows))

    outs, grads = [], []
    for factor in RECOMPUTED_STEPS:
        for layer in (first, second):
            layer.zero_grad(set_to_none=True)
        leaf = (sample.rows * factor).requires_grad_()
        with enter():
            out = both(leaf) if reentrant is None else scope.te_recompute(both, leaf, use_reentrant=reentrant)
        out.backward(sample.gradient * factor)
        outs.append(out.detach())
        grads.append({"rows": leaf.grad, "first.weight": first.weight.grad, "second.weight": second.weight.grad})
    history = _history(scope, {"first": first, "second": second}) if delayed else {}
    return _Seen(tuple(outs), tuple(grads), history)


def _first_out(bench: Bench, sample: _Sample, enter: Enter) -> Any:
    """Output of the first step where no gradients are wanted, as a reentrant checkpoint computes it."""
    first, second = _new_layers(bench, sample)
    with torch.no_grad(), enter():
        return second(first(sample.rows * RECOMPUTED_STEPS[0]))


def _history(scope: Any, layers: Mapping[str, Any]) -> dict[str, tuple[tuple[float, ...], float]]:
    """Amax values without the steps in which there was none, and scales.

    Transformer Engine lets histories move on once more at the end of a second forward pass, with nothing new in them:
    that drops no amax here, and leaves the scales as they are.
    """
    found = {}
    for name, layer in layers.items():
        for tensor, forward, column in (("input", True, 0), ("weight", True, 1), ("gradient", False, 0)):
            history, scale = scope.te_amax_state(layer, forward=forward)
            seen = tuple(value for value in history[:, column].tolist() if value)
            found[f"{name}.{tensor}"] = seen, float(scale[column])
    return found


def _of(seen: _Seen, name: str) -> tuple[Any, ...]:
    return tuple(step[name] for step in seen.grads)


def _same(some: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether tensors are there and bitwise the same."""
    pairs = zip(some, other, strict=True)
    return all(one is not None and two is not None and torch.equal(one, two) for one, two in pairs)
