"""The state of delayed scaling, held to its re-computation call by call; and what a cast makes of each value.

One layer is driven through what a training run brings: ordinary steps, a spike, the time until the spike has left the
history, steps of nothing but zeros, and several micro-batches a step. After each call its amax histories and scales
must be what `emulation.next_state` makes of the state before and the very tensors of the call. So one fault shows in
the phase that it belongs to, and not in all that come after.

A cast is seen from outside: a linear layer whose weight is the identity gives back its input as it was cast, and the
gradient of its output too; one whose input is the identity gives back its weight. Each value must be the emulation's,
also what saturates after a spike, and what is flushed to zero beside one.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from ...evidence.receipt import Part
from ..bench import Bench
from ..emulation import (
    FORMATS,
    LARGEST,
    DelayedRule,
    DelayedTensors,
    FormatName,
    Recipe,
    Update,
    cast,
    new_state,
    next_state,
)  # fmt: skip
from ..observe import Enter
from .quantizers import Tensor

ROWS: Final = 32  # of a call, or of an expert; FP8 products take multiples of 16
LENGTH: Final = 16  # calls that the recipe remembers
MICRO_BATCHES: Final = 3
# A correctly rounded quotient is the reference's own. A reciprocal times a number, which is what torch makes of
# `448 / amax`, is rounded twice: at most 1.5 units from the true quotient, so at most 1 from the one rounded once.
ULPS: Final = 1.0
ULPS_BECAUSE: Final = (
    "the fp64 quotient rounded to fp32; a reciprocal and a product may be 1 unit in the last place off"
)
WAYS: Final = {True: "forward", False: "backward"}


def default_update(device: str) -> Update:
    """How Transformer Engine brings its state up to date: by its kernel on a GPU, unless the environment says other."""
    unfused = bool(int(os.environ.get("NVTE_UNFUSED_FP8_UPDATE", "0") or "0"))
    return "python" if unfused or device == "cpu" else "fused"


def ulps(seen: float, wanted: float) -> float:
    """How many values of fp32 lie between two of them; infinite where one is none."""
    unit = float(torch.nextafter(torch.tensor(wanted).float(), torch.tensor(torch.inf))) - wanted
    off = abs(seen - wanted) / unit
    return float("inf") if math.isnan(off) else off


@dataclass
class Found:
    """What was seen of a tensor's state.

    Attributes:
        wrong: what -> the first difference; of the scale, the one that was furthest off.
        ulps: by how much that was; none was seen where it is negative.
    """

    wrong: dict[str, str] = field(default_factory=dict)
    ulps: float = -1.0

    def hold_scale(self, seen: float, wanted: float, of: str) -> None:
        """A scale beside the one that it should be."""
        off = ulps(seen, wanted)
        if off > self.ulps:
            self.ulps = off
            self.wrong["scale"] = f"{of}: seen {seen:.9g}, wanted {wanted:.9g}" if off else ""

    def hold(self, seen: DelayedTensors, wanted: DelayedTensors, column: int, of: str) -> None:
        """A column of the state after a call, beside its re-computation."""
        history, right = (state.history[:, column].tolist() for state in (seen, wanted))
        if history != right:
            self.wrong.setdefault("history", f"{of}: seen {history[::-1]}, wanted {right[::-1]}")
        self.hold_scale(float(seen.scale[column]), float(wanted.scale[column]), of)

    def check(self, bench: Bench, where: str, bound: float, why: str, *others: str) -> None:
        """A check of the scale, and one of each of the others."""
        off = self.ulps if self.ulps >= 0.0 else math.inf
        bench.check_parts(
            f"{where}.scale", Part("ulps", off, bound, off <= bound, why), detail=self.wrong.get("scale", "")
        )
        for what in others:
            said = self.wrong.get(what, "")
            bench.check(f"{where}.{what}", not said, said or "as re-computed, call by call")


def read_state(bench: Bench, layer: Any, forward: bool) -> DelayedTensors:
    """Amax histories and scales of a layer in one direction, copied to the host in fp64."""
    found = bench.bridge("fp8_scope").te_amax_state(layer, forward=forward)
    return DelayedTensors(*(tensor.detach().cpu().double().clone() for tensor in found))


# --- one layer --------------------------------------------------------------------------------------------------------


# Phase, and what rows, weight and gradient are multiplied by.
STEPS: Final[tuple[tuple[str, float, float, float], ...]] = (
    ("first", 1.0, 1.0, 1.0),
    ("normal", 0.75, 0.5, 0.875),
    ("spike", 64.0, 16.0, 256.0),
    # until the spike is in the history no longer
    *(("after-spike", 1.0 + index % 5 / 8.0, 1.0, 1.0 + index % 5 / 8.0) for index in range(LENGTH + 1)),
    *[("zero", 0.0, 0.0, 0.0)] * (LENGTH + 1),  # until a history that takes zeros in holds nothing else
    ("after-zero", 1.0, 1.0, 1.0),
    ("accumulated", 1.0, 1.0, 1.0),
    ("accumulated", 0.5, 1.0, 0.5),
    ("accumulated-late", 1.0, 1.0, 1.0),  # all forward passes before the first backward one, as a pipeline runs them
    ("accumulated-late", 0.5, 1.0, 0.5),
)


def check_delayed_state(bench: Bench, layer: Any, enter: Enter, *, update: Update, name: str = "state") -> None:
    """Hold amax histories (exactly) and scales (to one unit in the last place) to their re-computation.

    The checks are `NAME.PHASE.TENSOR.history` and `.scale`, `NAME.length`, and `NAME.others`: columns of tensors that
    are never cast stay as they were made.

    Args:
        bench: of the probe.
        layer: [..., K] -> [..., N], with `weight` [N, K]; it has never run. Its weight is put back afterwards.
        enter: makes the scope of the recipe: delayed scaling, HYBRID.
        update: how the state is brought up to date.
        name: of the checks.
    """
    found: defaultdict[tuple[str, str], Found] = defaultdict(Found)
    states: dict[bool, DelayedTensors] = {}
    wrong = {"length": "", "others": ""}

    def see(phase: str, forward: bool, *values: Any) -> None:
        """After a pass that cast these: the first columns of its state are theirs."""
        state = read_state(bench, layer, forward)
        before = states.get(forward) or new_state(LENGTH, state.scale.numel())
        states[forward] = state
        if state.history.shape != before.history.shape:
            wrong["length"] = f"the history is {tuple(state.history.shape)}, not {tuple(before.history.shape)}"
            return
        amax = torch.zeros(state.scale.numel(), dtype=torch.float64)
        for column, tensor in enumerate(values):
            amax[column] = float(tensor.detach().abs().amax())
        wanted = next_state(before, amax, DelayedRule(LARGEST["e4m3" if forward else "e5m2"], update))
        for column, tensor in enumerate(("input", "weight") if forward else ("gradient",)):
            found[phase, tensor].hold(state, wanted, column, f"column {column}")
        rest = slice(len(values), None)
        if bool((state.history[:, rest] != 0).any() or (state.scale[rest] != 1).any()):
            wrong["others"] = wrong["others"] or f"{phase}: {WAYS[forward]} {state.history[:, rest].tolist()}"

    weight = layer.weight.detach().clone()
    for phase, rows, of_weight, gradient in STEPS:
        with torch.no_grad():
            layer.weight.copy_(weight * of_weight)
        _run_step(bench, layer, enter, (rows, gradient), phase, partial(see, phase))
    with torch.no_grad():
        layer.weight.copy_(weight)
    for what, said in wrong.items():
        bench.check(f"{name}.{what}", not said, said or "as made")
    for (phase, tensor), one in found.items():
        one.check(bench, f"{name}.{phase}.{tensor}", ULPS, ULPS_BECAUSE, "history")


def _run_step(
    bench: Bench, layer: Any, enter: Enter, factors: tuple[float, float], phase: str, see: Callable[..., None]
) -> None:
    waiting: list[tuple[Any, Any]] = []

    def run_backward() -> None:
        for out, gradient in waiting:
            out.backward(gradient)
            see(False, gradient)
        waiting.clear()

    for number in range(MICRO_BATCHES if phase.startswith("accumulated") else 1):
        rows, gradient = (
            bench.randn(ROWS, width, dtype=torch.bfloat16) * (factor * (1 + number))
            for width, factor in zip(reversed(layer.weight.shape), factors, strict=True)
        )
        with enter():
            out = layer(rows.requires_grad_())
        see(True, rows, layer.weight)
        waiting.append((out, gradient))
        if phase != "accumulated-late":
            run_backward()
    run_backward()
    layer.zero_grad(set_to_none=True)


# --- every value of a cast --------------------------------------------------------------------------------------------

CAST_ROWS: Final = 128
TOGETHER: Final[tuple[tuple[Tensor, ...], ...]] = (("input", "gradient"), ("weight",))  # of what one run gives back
# Small enough that a scale of 1 would lose several percent of each.
DEVIATION: Final[dict[FormatName, float]] = {"e4m3": 2.0**-6, "e5m2": 2.0**-12}
# Under delayed scaling: factors of input and weight, and of the gradient. "settling" only fills the history.
PHASES: Final = (
    ("settling", 1.0, 1.0),
    ("settling", 1.0, 1.0),
    ("steady", 1.0, 1.0),
    ("spike", 4.0, 4.0),
    ("settling", 1.0, 1.0),  # a spike that only the next call remembers is forgotten after this one
    ("shrunk", 2.0**-9, 2.0**-23),
)
# Of a row's first value, over the deviation: a fifth of the values that share its scale is then below the smallest.
PEAK: Final[dict[FormatName, float]] = {"e4m3": 2.0**17, "e5m2": 2.0**31}
# A scale may be a unit off, so that a value between two of the format goes the other way; results are in bf16.
OTHERS: Final = 1e-3
ROUNDED: Final = 2.0**-7


def check_casts(
    bench: Bench, new_layer: Callable[[], Any], enter: Enter, recipe: Recipe, update: Update, name: str
) -> None:
    """Input and weight (E4M3) and the gradient of the output (E5M2), value by value, beside the emulated cast.

    The checks are `NAME.PHASE.TENSOR`. Without a history the phases are "steady" and "spiked": a peak in the first
    column does not saturate, and takes the small values with it that share its scale, and no others.

    Args:
        bench: of the probe.
        new_layer: makes a linear layer, [M, K] -> [M, K], with `weight` [K, K] and perhaps `bias` [K].
        enter: makes the scope of the recipe.
        recipe: which one.
        update: how the state of delayed scaling is brought up to date.
        name: of the checks.
    """
    delayed = recipe == "delayed"
    for tensors in TOGETHER:
        formats = {tensor: FORMATS["dgrad" if tensor == "gradient" else "forward"][recipe][0] for tensor in tensors}
        states = dict.fromkeys(tensors, new_state(LENGTH, 1))
        layer = None
        for phase, of_rows, of_gradient in PHASES if delayed else (("steady", 1.0, 1.0), ("spiked", 1.0, 1.0)):
            layer = layer if delayed and layer is not None else _identity(new_layer())
            given, width = {}, layer.weight.shape[1]
            for tensor, kind in formats.items():
                deviation = DEVIATION[kind] * (of_gradient if tensor == "gradient" else of_rows)
                count = width if tensor == "weight" else CAST_ROWS
                given[tensor] = bench.randn(count, width, dtype=torch.bfloat16, scale=deviation)
                if phase == "spiked":
                    given[tensor][:, 0] = deviation * PEAK[kind]
            kept = _run_identity(layer, enter, given)
            for tensor, values in given.items():
                kind, side = formats[tensor], "weight" if tensor == "weight" else "rows"
                if phase != "settling":
                    scale = float(states[tensor].scale[0])
                    _check_cast(bench, f"{name}.{phase}.{tensor}", kept[tensor], values, (kind, recipe, side), scale)
                amax = values.detach().abs().amax().cpu().reshape(1)
                states[tensor] = next_state(states[tensor], amax, DelayedRule(LARGEST[kind], update))


def _check_cast(
    bench: Bench, name: str, seen: Any, values: Any, how: tuple[FormatName, Recipe, Any], scale: float
) -> None:
    if seen is None or seen.shape != values.shape:
        return bench.check(name, False, "what was cast did not come out: no tensor, or another shape")
    wanted = cast(values, *how, scale=scale)
    off = (seen.double() - wanted).abs()
    share = float((~(off <= ROUNDED * wanted.abs())).double().mean())
    zeros, top = int((wanted == 0).sum()), int((wanted.abs() == wanted.abs().max()).sum())
    why = (
        f"values that are not the emulated cast's, of which {zeros} are zeros and {top} the largest of {values.numel()}"
    )
    return bench.check_parts(
        name, Part("others", share, OTHERS, share <= OTHERS, "ties, and scales a unit off"), detail=why
    )


def _identity(layer: Any) -> Any:
    """No sum has more than one term, and 1 is a value of every format: what comes out is what was cast."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        torch.nn.init.eye_(layer.weight)
    return layer


def _run_identity(layer: Any, enter: Enter, given: Mapping[Tensor, Any]) -> dict[Tensor, Any]:
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
