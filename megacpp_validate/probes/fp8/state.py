"""The state of delayed scaling in a layer of Transformer Engine, held to its re-computation call by call.

A layer is driven through what a training run brings: ordinary steps, a spike, the time until the spike has left the
history, steps of nothing but zeros, and several micro-batches a step. After each call its amax histories and scales
must be what `references.delayed_scaling` makes of the state before and the very tensors of the call. So one fault is
told in the phase that it belongs to, and not in all that come after.

How much of a tensor an FP8 cast loses: what saturates, and what is flushed to zero.

Seen from outside: a linear layer whose weight is the identity gives back its input as it was cast, and the gradient of
its output too; one whose input is the identity gives back its weight. Under delayed scaling the cast is that of the
calls before, so of normal values with a known deviation the share that is lost follows from the re-computed scale. Both
sides are bounded: a step after a spike must lose small values, or the spike was forgotten; a spike must saturate, or
its own scale was used.

Without a history the scale is that of the very tensor, or of the block: a peak does not saturate, and takes the small
values with it that share its scale, and no others.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ...evidence.receipt import Check, Part
from ..bench import Bench
from ..bounds import unit_roundoff
from ..emulation import BLOCKS, FORMATS, LARGEST, FormatName, Recipe
from ..memory import Enter
from ..references.delayed_scaling import DelayedRule, DelayedTensors, Update, new_state, next_state
from .quantizers import Tensor

ROWS: Final = 32  # of the input; FP8 products take multiples of 16
MICRO_BATCHES: Final = 3
# A correctly rounded quotient is the reference's own. A reciprocal times a number, which is what torch makes of
# `448 / amax`, is rounded twice: at most 1.5 units from the true quotient, so at most 1 from the one rounded once.
ULPS: Final = 1.0
ULPS_BECAUSE: Final = (
    "the fp64 quotient rounded to fp32; a reciprocal and a product may be 1 unit in the last place off"
)


@dataclass(frozen=True)
class Operand:
    """A tensor that a call casts to FP8.

    Attributes:
        name: for the checks.
        forward: in which pass, and so in which state and format.
        index: its column there.
        values: what is cast.
    """

    name: str
    forward: bool
    index: int
    values: Any


def linear_operands(layer: Any, rows: Any, gradient: Any) -> Sequence[Operand]:
    """Those of a `te.Linear`: columns of its forward state are input, weight and output; its backward one has two."""
    return (
        Operand("input", True, 0, rows),
        Operand("weight", True, 1, layer.weight),
        Operand("gradient", False, 0, gradient),
    )


@dataclass(frozen=True)
class _Step:
    """One training step: what its tensors are multiplied by, and how many micro-batches it has.

    Attributes:
        late: all forward passes before the first backward one, as a pipeline runs them.
    """

    phase: str
    rows: float
    weight: float
    gradient: float
    micro_batches: int = 1
    late: bool = False


def _steps(length: int) -> Iterator[_Step]:
    yield _Step("first", 1.0, 1.0, 1.0)
    yield _Step("normal", 0.75, 0.5, 0.875)
    yield _Step("spike", 64.0, 16.0, 256.0)
    for index in range(length + 1):  # until the spike is in the history no longer
        factor = 1.0 + index % 5 / 8.0
        yield _Step("after-spike", factor, 1.0, factor)
    for _ in range(length + 1):  # until a history that takes zeros in holds nothing else
        yield _Step("zero", 0.0, 0.0, 0.0)
    yield _Step("after-zero", 1.0, 1.0, 1.0)
    for phase, late in (("accumulated", False), ("accumulated-late", True)):
        for factor in (1.0, 0.5):
            yield _Step(phase, factor, 1.0, factor, MICRO_BATCHES, late)


def default_update(device: str) -> Update:
    """How Transformer Engine brings its state up to date: by its kernel on a GPU, unless the environment says other."""
    unfused = bool(int(os.environ.get("NVTE_UNFUSED_FP8_UPDATE", "0") or "0"))
    return "python" if unfused or device == "cpu" else "fused"


def check_delayed_state(
    bench: Bench,
    layer: Any,
    enter: Enter,
    *,
    length: int = 16,
    update: Update | None = None,
    name: str = "state",
) -> None:
    """Hold amax histories (exactly) and scales (to one unit in the last place) to their re-computation.

    The checks are `NAME.PHASE.TENSOR.history` and `.scale`, `NAME.length`, and `NAME.others`: columns of tensors that
    are never cast stay as they were made.

    Args:
        bench: of the probe; its module's bridge has `te_amax_state`.
        layer: [..., K] -> [..., N], with `weight` [N, K]; it has never run. Its weight is put back afterwards.
        enter: makes the scope of the recipe: delayed scaling, HYBRID.
        length: H, calls that the recipe remembers.
        update: how the state is brought up to date; `default_update` of the device without it.
        name: of the checks.
    """
    how = update or default_update(bench.device)
    rules = {
        True: DelayedRule(LARGEST["e4m3"], how),
        False: DelayedRule(LARGEST["e5m2"], how),
    }
    follower = _Follower(bench.bridge("fp8_scope").te_amax_state, layer, rules, length)
    weight = layer.weight.detach().clone()
    try:
        for step in _steps(length):
            with torch.no_grad():
                layer.weight.copy_(weight * step.weight)
            _run_step(bench, layer, enter, step, follower)
    finally:
        with torch.no_grad():
            layer.weight.copy_(weight)
    bench.checks += follower.checks(name)


def _run_step(bench: Bench, layer: Any, enter: Enter, step: _Step, follower: _Follower) -> None:
    waiting: list[tuple[Any, Any, Sequence[Operand]]] = []
    for number in range(step.micro_batches):
        out_features, in_features = layer.weight.shape
        rows = bench.randn(ROWS, in_features, dtype=torch.bfloat16) * (step.rows * (1 + number))
        gradient = bench.randn(ROWS, out_features, dtype=torch.bfloat16) * (step.gradient * (1 + number))
        cast = linear_operands(layer, rows, gradient)
        with enter():
            out = layer(rows.requires_grad_())
        follower.see(step.phase, cast, forward=True)
        waiting.append((out, gradient, cast))
        if not step.late:
            _run_backward(step, waiting, follower)
    _run_backward(step, waiting, follower)
    layer.zero_grad(set_to_none=True)


def _run_backward(step: _Step, waiting: list[tuple[Any, Any, Sequence[Operand]]], follower: _Follower) -> None:
    for out, gradient, cast in waiting:
        out.backward(gradient)
        follower.see(step.phase, cast, forward=False)
    waiting.clear()


@dataclass
class _Seen:
    """What a tensor's state was seen to do in a phase."""

    calls: int = 0
    history: str = ""  # the first difference
    ulps: float = 0.0
    scale: str = ""  # where the scale was furthest off


class _Follower:
    """Reads a layer's state after each call, and holds it to the one before."""

    def __init__(self, read: Callable[..., Any], layer: Any, rules: dict[bool, DelayedRule], length: int) -> None:
        self._read, self._layer, self._rules, self._length = read, layer, rules, length
        self._states: dict[bool, DelayedTensors] = {}
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._others = self._wrong_length = ""

    def see(self, phase: str, cast: Sequence[Operand], *, forward: bool) -> None:
        """After a forward or a backward pass."""
        history, scale = (tensor.detach().cpu().double().clone() for tensor in self._read(self._layer, forward=forward))
        before = self._states.get(forward) or new_state(self._length, scale.numel())
        self._states[forward] = DelayedTensors(history, scale)
        if history.shape != before.history.shape:
            self._wrong_length = f"the history is {tuple(history.shape)} instead of {tuple(before.history.shape)}"
            return
        columns = [operand for operand in cast if operand.forward is forward]
        amax = torch.zeros(scale.numel(), dtype=torch.float64)
        for operand in columns:
            amax[operand.index] = float(operand.values.detach().abs().amax())
        wanted = next_state(before, amax, self._rules[forward])
        for operand in columns:
            self._compare(phase, operand, DelayedTensors(history, scale), wanted)
        rest = [index for index in range(scale.numel()) if index not in {operand.index for operand in columns}]
        if bool((history[:, rest] != 0).any() or (scale[rest] != 1).any()):
            way = "forward" if forward else "backward"
            self._others = self._others or f"{phase}: {way} histories {history[:, rest].tolist()}, {scale[rest]}"

    def _compare(self, phase: str, operand: Operand, seen: DelayedTensors, wanted: DelayedTensors) -> None:
        found = self._seen.setdefault((phase, operand.name), _Seen())
        found.calls += 1
        history, right = (state.history[:, operand.index].tolist() for state in (seen, wanted))
        if history != right and not found.history:
            found.history = f"call {found.calls}: seen {_shown(history)}, wanted {_shown(right)}"
        scale, exact = float(seen.scale[operand.index]), float(wanted.scale[operand.index])
        off = ulps(scale, exact)
        if not off <= found.ulps:
            found.ulps = off
            found.scale = f"call {found.calls}: seen {scale:.9g}, wanted {exact:.9g}"

    def checks(self, name: str) -> list[Check]:
        """Of everything that was seen."""
        made = [Check(f"{name}.length", not self._wrong_length, detail=self._wrong_length or f"{self._length} calls")]
        for (phase, tensor), seen in self._seen.items():
            where = f"{name}.{phase}.{tensor}"
            said = seen.history or f"{seen.calls} calls, each as re-computed"
            part = Part("ulps", seen.ulps, ULPS, seen.ulps <= ULPS, ULPS_BECAUSE)
            made.append(Check(f"{where}.history", not seen.history, detail=said))
            made.append(Check(f"{where}.scale", part.passed, (part,), seen.scale))
        made.append(Check(f"{name}.others", not self._others, detail=self._others or "no other tensor has a state"))
        return made


def ulps(seen: float, wanted: float) -> float:
    """How many values of fp32 lie between two of them; infinite where one is none."""
    unit = float(torch.nextafter(torch.tensor(wanted).float(), torch.tensor(torch.inf))) - wanted
    off = abs(seen - wanted) / unit
    return float("inf") if math.isnan(off) else off


def _shown(history: list[float]) -> str:
    """The newest first, without the zeros at the end."""
    newest = [f"{value:g}" for value in reversed(history)]
    while len(newest) > 1 and newest[-1] == "0":
        newest.pop()
    return f"({', '.join(newest)})"


CAST_ROWS: Final = 128
TOGETHER: Final[tuple[tuple[Tensor, ...], ...]] = (("input", "gradient"), ("weight",))  # of what one run gives back
SMALLEST: Final[dict[FormatName, float]] = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}  # subnormal, above zero
# Small enough that a scale of 1 would lose several percent of each.
DEVIATION: Final[dict[FormatName, float]] = {"e4m3": 2.0**-6, "e5m2": 2.0**-12}
# Factors of input and weight, and of the gradient. "settling" is not judged: it fills the history.
PHASES: Final = (
    ("settling", 1.0, 1.0),
    ("settling", 1.0, 1.0),
    ("steady", 1.0, 1.0),
    ("spike", 4.0, 4.0),
    ("settling", 1.0, 1.0),  # a spike that only the next call remembers is forgotten after this one
    ("shrunk", 2.0**-9, 2.0**-23),
)
STANDARD_DEVIATIONS: Final = 6.0
FEW: Final = 6.0  # more of them, where so few are expected that they are not normal (Poisson)
# Of a row's first value, over the deviation: a fifth of the values that share its scale is then below the smallest.
PEAK: Final[dict[FormatName, float]] = {"e4m3": 2.0**17, "e5m2": 2.0**31}
SHADE: Final = 2.0**-7  # values and results are rounded to bf16: what is counted begins that much earlier or later


@dataclass(frozen=True)
class _Cast:
    """A tensor before a cast and after it, with the scale that the cast must have had.

    Attributes:
        values: [M, K] before.
        kept: the same after.
        deviation: of the normal distribution that the values come from.
    """

    which: FormatName
    values: Any
    kept: Any
    scale: float
    deviation: float


def check_shares(
    bench: Bench,
    new_layer: Callable[[], Any],
    enter: Enter,
    *,
    length: int = 16,
    update: Update | None = None,
    name: str = "shares",
) -> None:
    """Shares of overflowed and underflowed elements of input and weight (E4M3) and the gradient of the output (E5M2).

    The checks are `NAME.PHASE.TENSOR.overflowed` and `.underflowed`.

    Args:
        bench: of the probe.
        new_layer: makes a linear layer, [M, K] -> [M, K], with `weight` [K, K] and perhaps `bias` [K].
        enter: makes the scope of the recipe: delayed scaling, HYBRID.
        length, update: of the recipe, as in `state.check_delayed_state`.
        name: of the checks.

    Raises:
        ValueError: the layer is not square.
    """
    how = update or default_update(bench.device)
    for tensors in TOGETHER:
        layer = _square(new_layer(), 0)
        rules = {tensor: DelayedRule(LARGEST[_format("delayed", tensor)], how) for tensor in tensors}
        states = {tensor: new_state(length, 1) for tensor in tensors}
        for phase, of_rows, of_gradient in PHASES:
            factors: dict[Tensor, float] = {"input": of_rows, "weight": of_rows, "gradient": of_gradient}
            deviations = {tensor: DEVIATION[_format("delayed", tensor)] * factors[tensor] for tensor in tensors}
            given = {tensor: _normal(bench, layer, tensor, deviations[tensor]) for tensor in tensors}
            kept = _run(layer, enter, given)
            for tensor, values in given.items():
                scale = float(states[tensor].scale[0])
                if phase != "settling":
                    cast = _Cast(_format("delayed", tensor), values, kept[tensor], scale, deviations[tensor])
                    bench.checks += _judge(f"{name}.{phase}.{tensor}", cast)
                amax = values.detach().abs().amax().cpu().reshape(1)
                states[tensor] = next_state(states[tensor], amax, rules[tensor])


def check_shares_of_a_cast(
    bench: Bench, new_layer: Callable[[], Any], enter: Enter, recipe: Recipe, *, name: str = "shares"
) -> None:
    """The same under a recipe without a history: nothing saturates, and what a peak flushes is what shares its scale.

    The checks are `NAME.PHASE.TENSOR.overflowed` and `.underflowed`; phases are "steady", "spiked" (what shares a scale
    with a peak) and, where scales are of blocks, "beside" (what does not).

    Args:
        bench: of the probe.
        new_layer: as for `check_shares`; wider than a block.
        enter: makes the scope of the recipe.
        recipe: without a history.
        name: of the checks.

    Raises:
        ValueError: the layer is not square, or not wider than a block.
    """
    along = BLOCKS[recipe]["rows"].along if recipe in BLOCKS else 0
    for tensors in TOGETHER:
        for peaked in (False, True):
            layer = _square(new_layer(), along)
            deviations = {tensor: DEVIATION[_format(recipe, tensor)] for tensor in tensors}
            given = {tensor: _normal(bench, layer, tensor, deviations[tensor]) for tensor in tensors}
            for tensor, values in given.items():
                if peaked:
                    values[:, 0] = deviations[tensor] * PEAK[_format(recipe, tensor)]
            kept = _run(layer, enter, given)
            for tensor, values in given.items():
                which, came = _format(recipe, tensor), kept[tensor]
                for phase, columns in _phases(peaked, along, values.shape[1]).items():
                    part, of_part = values[:, columns], None if came is None else came[:, columns]
                    scale = _least_scale(part, which, power_of_two=recipe in BLOCKS)
                    cast = _Cast(which, part, of_part, scale, deviations[tensor])
                    bench.checks += _judge(f"{name}.{phase}.{tensor}", cast)


def _phases(peaked: bool, along: int, width: int) -> dict[str, slice]:
    """Columns of what is told together: every row's first block has a peak, the others have none."""
    if not peaked:
        return {"steady": slice(0, width)}
    return {"spiked": slice(0, along), "beside": slice(along, width)} if along else {"spiked": slice(0, width)}


def _least_scale(values: Any, which: FormatName, *, power_of_two: bool) -> float:
    """That of the block with the largest value of all; the other blocks lose less."""
    scale = LARGEST[which] / float(values.abs().max())
    return 2.0 ** math.floor(math.log2(scale)) if power_of_two else scale


def _format(recipe: Recipe, tensor: Tensor) -> FormatName:
    return FORMATS["dgrad" if tensor == "gradient" else "forward"][recipe][0]


def _normal(bench: Bench, layer: Any, tensor: Tensor, deviation: float) -> Any:
    width = layer.weight.shape[1]
    return bench.randn(width if tensor == "weight" else CAST_ROWS, width, dtype=torch.bfloat16, scale=deviation)


def _square(layer: Any, along: int) -> Any:
    """No sum has more than one term, and 1 is a value of every format: what comes out is what was cast."""
    out_features, width = layer.weight.shape
    if out_features != width or width <= along:
        raise ValueError(
            f"the layer is {width} -> {out_features}, not square and wider than {along}. Next step: pass one that is."
        )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        torch.nn.init.eye_(layer.weight)
    return layer


def _run(layer: Any, enter: Enter, given: Mapping[Tensor, Any]) -> dict[Tensor, Any]:
    """What came out of the cast of each: of the weight, or of input and gradient."""
    if "weight" in given:
        with torch.no_grad():
            layer.weight.copy_(given["weight"])
        rows = torch.eye(layer.weight.shape[1], dtype=torch.bfloat16, device=layer.weight.device)
        with enter():
            out = layer(rows)
        return {"weight": out.detach().t()}
    leaf = given["input"].clone().requires_grad_()
    with enter():
        out = layer(leaf)
    out.backward(given["gradient"])
    layer.zero_grad(set_to_none=True)
    return {"input": out.detach(), "gradient": leaf.grad}


def _judge(name: str, cast: _Cast) -> list[Check]:
    if cast.kept is None or cast.kept.shape != cast.values.shape or not bool(torch.isfinite(cast.kept).all()):
        return [Check(name, False, detail="what was cast did not come out: no tensor, another shape, or not finite")]
    values, kept = cast.values.detach().double().abs(), cast.kept.double().abs()
    # Half a spacing below, and no further, is rounding. Small values lose more by it; those are not the largest.
    loss = (1.0 - unit_roundoff(cast.which)) * (1.0 - 2.0**-8)
    overflowed = (kept == kept.max()) & (kept > 0) & (kept < values * loss)
    underflowed = (kept == 0) & (values > 0)
    top, bottom = LARGEST[cast.which] / cast.scale / loss, SMALLEST[cast.which] / cast.scale / 2.0
    count = values.numel()
    return [
        _hold(f"{name}.overflowed", int(overflowed.sum()), count, _outside(top, cast.deviation), "above", top, cast),
        _hold(
            f"{name}.underflowed", int(underflowed.sum()), count, _inside(bottom, cast.deviation), "in", bottom, cast
        ),
    ]


def _outside(limit: float, deviation: float) -> tuple[float, float]:
    """Least and largest probability that a normal value lies outside of about +-limit."""
    wide, narrow = (limit * (1 + SHADE), limit * (1 - SHADE))
    return tuple(math.erfc(edge / deviation / math.sqrt(2.0)) for edge in (wide, narrow))  # type: ignore[return-value]


def _inside(limit: float, deviation: float) -> tuple[float, float]:
    """The same, inside."""
    wide, narrow = (limit * (1 + SHADE), limit * (1 - SHADE))
    return tuple(math.erf(edge / deviation / math.sqrt(2.0)) for edge in (narrow, wide))  # type: ignore[return-value]


def _hold(name: str, seen: int, count: int, odds: tuple[float, float], where: str, limit: float, cast: _Cast) -> Check:
    least, most = (
        count * p + sign * (STANDARD_DEVIATIONS * math.sqrt(count * p * (1.0 - p)) + FEW)
        for p, sign in zip(odds, (-1.0, 1.0), strict=True)
    )
    edge = f"|x| {'>' if where == 'above' else '<='} {limit:.3g} of normal values of deviation {cast.deviation:.3g}"
    odd = f"probability {odds[0]:.3g} to {odds[1]:.3g} ({edge}; the scale must be {cast.scale:.6g})"
    slack = f"{STANDARD_DEVIATIONS:g} binomial standard deviations and {FEW:g} of {count}"
    share = seen / count
    parts = [Part("share", share, most / count, share <= most / count, f"{odd}, and {slack} more")]
    if least > 0:
        floor = least / count
        parts.append(Part("least-share", share, floor, share >= floor, f"{odd}, but for {slack}", at_least=True))
    return Check(name, all(part.passed for part in parts), tuple(parts))
