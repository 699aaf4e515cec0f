"""The state of delayed scaling in a layer of Transformer Engine, held to its re-computation call by call.

A layer is driven through what a training run brings: ordinary steps, a spike, the time until the spike has left the
history, steps of nothing but zeros, and several micro-batches a step. After each call its amax histories and scales
must be what `references.delayed_scaling` makes of the state before and the very tensors of the call. So one fault is
told in the phase that it belongs to, and not in all that come after.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ...evidence.receipt import Check, Part
from ..bench import Bench
from ..emulation import LARGEST
from ..low_precision import Enter
from ..references.delayed_scaling import Algorithm, DelayedRule, DelayedTensors, Update, new_state, next_state

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


Operands = Callable[[Any, Any, Any], Sequence[Operand]]


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
    algorithm: Algorithm = "max",
    margin: int = 0,
    update: Update | None = None,
    operands: Operands = linear_operands,
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
        algorithm: of the recipe.
        margin: of the recipe.
        update: how the state is brought up to date; `default_update` of the device without it.
        operands: (layer, rows, gradient of the output) -> what a call casts.
        name: of the checks.
    """
    how = update or default_update(bench.device)
    rules = {
        True: DelayedRule(LARGEST["e4m3"], algorithm, margin, how),
        False: DelayedRule(LARGEST["e5m2"], algorithm, margin, how),
    }
    follower = _Follower(bench.bridge("fp8_scope").te_amax_state, layer, rules, length)
    weight = layer.weight.detach().clone()
    try:
        for step in _steps(length):
            with torch.no_grad():
                layer.weight.copy_(weight * step.weight)
            _run_step(bench, layer, enter, step, operands, follower)
    finally:
        with torch.no_grad():
            layer.weight.copy_(weight)
    bench.checks += follower.checks(name)


def _run_step(bench: Bench, layer: Any, enter: Enter, step: _Step, operands: Operands, follower: _Follower) -> None:
    waiting: list[tuple[Any, Any, Sequence[Operand]]] = []
    for number in range(step.micro_batches):
        out_features, in_features = layer.weight.shape
        rows = bench.randn(ROWS, in_features, dtype=torch.bfloat16) * (step.rows * (1 + number))
        gradient = bench.randn(ROWS, out_features, dtype=torch.bfloat16) * (step.gradient * (1 + number))
        cast = operands(layer, rows, gradient)
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
