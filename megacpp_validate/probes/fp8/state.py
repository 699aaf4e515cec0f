"""The state of delayed scaling, held to its re-computation call by call.

One layer is driven through what a training run brings: ordinary steps, a spike, the time until the spike has left the
history, steps of nothing but zeros, and several micro-batches a step. After each call its amax histories and scales
must be what `emulation.next_state` makes of the state before and the very tensors of the call. So one fault shows in
the phase that it belongs to, and not in all that come after.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from ..bench import Bench
from ..bounds import part
from ..emulation import LARGEST, DelayedTensors, FormatName, Update, new_state, next_state
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
TENSORS: Final[dict[bool, tuple[Tensor, ...]]] = {True: ("input", "weight"), False: ("gradient",)}
FORMATS: Final[dict[bool, FormatName]] = {True: "e4m3", False: "e5m2"}


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
        bench.check_parts(f"{where}.scale", part("ulps", off, bound, why), detail=self.wrong.get("scale", ""))
        for what in others:
            said = self.wrong.get(what, "")
            bench.check(f"{where}.{what}", not said, said or "as re-computed, call by call")


@dataclass
class Follower:
    """Holds the states of layers to their re-computation, pass by pass.

    Attributes:
        bench: of the probe.
        update: how states are brought up to date.
        states: layer and whether forward -> histories and scales as they were last seen.
        found: phase or layer, and tensor -> what was seen of it.
    """

    bench: Bench
    update: Update
    states: dict[tuple[str, bool], DelayedTensors] = field(default_factory=dict)
    found: defaultdict[tuple[str, Tensor], Found] = field(default_factory=lambda: defaultdict(Found))

    def read(self, name: str, layer: Any, forward: bool) -> tuple[DelayedTensors, DelayedTensors]:
        """The state of a layer in one direction before its last pass and after it, on the host in fp64."""
        found = self.bench.bridge("fp8_scope").te_amax_state(layer, forward=forward)
        after = DelayedTensors(*(tensor.detach().cpu().double().clone() for tensor in found))
        before = self.states.get((name, forward)) or new_state(LENGTH, after.scale.numel())
        self.states[name, forward] = after
        return before, after

    def next(self, state: DelayedTensors, amax: Any, forward: bool) -> DelayedTensors:
        """The state after an update that takes these amaxes in, one a column."""
        return next_state(state, amax, LARGEST[FORMATS[forward]], self.update)


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
    follower, wrong = Follower(bench, update), {"length": "", "others": ""}

    def see(phase: str, forward: bool, *values: Any) -> None:
        """After a pass that cast these: the first columns of its state are theirs."""
        before, state = follower.read("", layer, forward)
        if state.history.shape != before.history.shape:
            wrong["length"] = f"the history is {tuple(state.history.shape)}, not {tuple(before.history.shape)}"
        amax = torch.zeros(state.scale.numel(), dtype=torch.float64)
        for column, tensor in enumerate(values):
            amax[column] = float(tensor.detach().abs().amax())
        wanted = follower.next(before, amax, forward)
        for column, tensor in enumerate(TENSORS[forward]):
            follower.found[phase, tensor].hold(state, wanted, column, f"column {column}")
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
    for (phase, tensor), one in follower.found.items():
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
