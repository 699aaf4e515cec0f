"""The state of delayed scaling, held to its re-computation call by call.

One layer is driven through what a training run brings: ordinary steps, a spike, the time until the spike has left the
history, steps of nothing but zeros, and several micro-batches a step. After each call its amax histories and scales
must be what `emulation.next_state` makes of the state before and the very tensors of the call. So one fault shows in
the phase that it belongs to, and not in all that come after.

Delayed scaling over layers of every kind in one scope, and several scopes a step.

Layers of every kind share scopes, several a step, each operand of its own size, so that mix-ups show. What a
product was given is read off the product (`quantizers`), and held to the state of the very tensor that it should have
been cast by: its scale before the call, and the amax that the state took in. So no operand may borrow another's
quantizer, and each history moves on once a scope, whatever number of layers it holds. A layer that is called twice in a
scope shows that also where a kernel leaves histories alone that saw nothing.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch

from ..bench import Bench
from ..bounds import part
from ..emulation import LARGEST, DelayedTensors, FormatName, Product, Update, new_state, next_state
from ..observe import Enter
from .quantizers import Operand, Tensor, watching_operands

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
PHASES: Final[tuple[tuple[str, float, float, float], ...]] = (
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
    for phase, rows, of_weight, gradient in PHASES:
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


# --- layers of every kind in one scope, and several scopes a step -----------------------------------------------------

WIDTH: Final = 64
OUT: Final = 96
EXPERTS: Final = 3
# Steps between experts: operands of one state lie apart by more than the half unit of E5M2, 1/8.
ROWS_APART: Final = 4.0
WEIGHTS_APART: Final = 64.0
GRADIENTS_APART: Final = 8.0
# Steps: the factor of the tensors of each of its scopes. The spike stays in the history for what comes after it.
STEPS: Final = ((1.0,), (0.5,), (16.0, 2.0), (1.0, 4.0))
# The scale before the call is known; its inverse is a division, which may be a unit off, and after the first of two
# backward updates the scale itself is re-computed, which may be one more.
ULPS_OF_A_PRODUCT: Final = 2.0
# The amax that a state takes in is of the values before the cast, what a product has is after it: half a unit of the
# format apart, relative, or half of its smallest subnormal. A norm or an activation that casts by itself may round
# to bf16 in between: 2^-8 covers that rounding twice over.
HALF_UNIT: Final[dict[FormatName, float]] = {"e4m3": 2.0**-4 + 2.0**-8, "e5m2": 2.0**-3 + 2.0**-8}
HALF_SUBNORMAL: Final[dict[FormatName, float]] = {"e4m3": 2.0**-10, "e5m2": 2.0**-17}
# Backward products, and the operand of the forward one that each multiplies again.
AGAIN: Final[dict[Product, Tensor]] = {"dgrad": "weight", "wgrad": "input"}


class ScopeLayer(NamedTuple):
    """One layer.

    Attributes:
        name: for the checks.
        module: of Transformer Engine.
        gemms: G, products of its forward pass; expert or place of each is its index.
        width, out: features of its input and output.
        splits: rows of each expert; empty where there is one group.
    """

    name: str
    module: Any
    gemms: int
    width: int
    out: int
    splits: tuple[int, ...] = ()

    def rows(self, bench: Bench, factor: float) -> Any:
        """[R, width] bf16, a leaf."""
        return self._sample(bench, self.width, factor, ROWS_APART).requires_grad_()

    def gradient(self, bench: Bench, factor: float) -> Any:
        """[R, out] bf16, of the output."""
        return self._sample(bench, self.out, factor, 1.0 / GRADIENTS_APART)

    def __call__(self, rows: Any) -> Any:
        """[R, width] -> [R, out]."""
        return self.module(rows, list(self.splits)) if self.splits else self.module(rows)

    def _sample(self, bench: Bench, width: int, factor: float, apart: float) -> Any:
        groups = enumerate(self.splits or (ROWS,))
        return torch.cat([bench.randn(n, width, dtype=torch.bfloat16) * (factor * apart**index) for index, n in groups])


def new_layers(bench: Bench, width: int = WIDTH, out: int = OUT) -> Sequence[ScopeLayer]:
    """`Linear`, `LayerNormLinear`, `LayerNormMLP` and `GroupedLinear`, with weights of their own."""
    norm, new = {"normalization": "RMSNorm", "eps": 1e-5}, bench.te_layer
    mlp = new("layernorm_mlp", width, out, activation="swiglu", **norm)
    layers = (
        ScopeLayer("linear", new("linear", width, out), 1, width, out),
        ScopeLayer("norm-linear", new("layernorm_linear", width, out, **norm), 1, width, out),
        ScopeLayer("mlp", mlp, 2, width, width),
        ScopeLayer("experts", new("grouped_linear", EXPERTS, width, out), EXPERTS, width, out, (ROWS,) * EXPERTS),
    )
    with torch.no_grad():
        for layer in layers:
            weights = [value for value in layer.module.parameters() if value.dim() > 1]
            for index, weight in enumerate(weights):
                size = weight.shape[-1] ** -0.5 * WEIGHTS_APART**index
                weight.copy_(bench.randn(*weight.shape, scale=size))
    return layers


def check_scopes(bench: Bench, enter: Enter, *, update: Update, name: str) -> None:
    """Run layers of every kind together, and hold the state of every operand to what its products were given.

    The checks are `NAME.products`, `NAME.updates.WAY`, and of each layer `NAME.LAYER.TENSOR.scale`, `.amax`, `.history`
    and `.kept`, that the backward pass multiplies the very values of the forward one.

    Args:
        bench: of the probe.
        enter: makes the scope of the recipe: delayed scaling, HYBRID, algorithm "max".
        update: what brings the state up to date.
        name: of the checks.
    """
    layers = new_layers(bench)
    calls = (*range(len(layers)), 0)  # the first one again: both of its calls are one entry of its history
    follower = _Follower(bench, layers, calls, update)
    manager = bench.bridge("imports").fp8_state_manager.require()
    plain = manager.reduce_and_update_fp8_tensors
    with patch.object(manager, "reduce_and_update_fp8_tensors", wraps=plain) as updates:
        for factors in STEPS:
            _run_shared_step(bench, enter, layers, calls, factors, follower)
    bench.check(f"{name}.products", not follower.missing, follower.missing or "each product was seen once")
    counts = Counter((*call.args, call.kwargs.get("forward", True))[0] for call in updates.call_args_list)
    wanted = sum(map(len, STEPS))
    for forward, way in WAYS.items():
        seen = counts[forward]
        bench.check(f"{name}.updates.{way}", seen == wanted, f"{seen} updates in {wanted} scopes")
    follower.check(name)


def _run_shared_step(
    bench: Bench, enter: Enter, layers: Sequence[ScopeLayer], calls: Sequence[int], factors: Sequence[float],
    follower: _Follower,
) -> None:  # fmt: skip
    """Forward passes in a scope each, then one backward pass over all of them."""
    outs, gradients, forwards = [], [], []
    for number, factor in enumerate(factors):
        # Of a layer that is called twice, each call has the larger amax once: neither the first nor the last one wins.
        sizes = [factor * (1.0 + place) ** (-1) ** number for place in range(len(calls))]
        rows = [layers[call].rows(bench, size) for size, call in zip(sizes, calls, strict=True)]
        gradients += [layers[call].gradient(bench, size) for size, call in zip(sizes, calls, strict=True)]
        with watching_operands() as seen, enter():
            outs += [layers[call](given) for call, given in zip(calls, rows, strict=True)]
        forwards.append(seen)
        follower.see_forward(seen)
    with watching_operands() as seen:
        torch.autograd.backward(outs, gradients)
    follower.see_backward(forwards, seen)
    for layer in layers:
        layer.module.zero_grad(set_to_none=True)


Placed = tuple[int, ScopeLayer, int, Operand]
"""Scope of the step, layer, product of the layer's call, operand."""


class _Follower(Follower):
    """Holds the states of all layers to the operands that products were given."""

    def __init__(self, bench: Bench, layers: Sequence[ScopeLayer], calls: Sequence[int], update: Update) -> None:
        super().__init__(bench, update)
        self._layers, self._calls = layers, [layers[call] for call in calls]
        self.missing = ""

    def see_forward(self, seen: Sequence[Operand]) -> None:
        """After a scope."""
        self._see(True, [*self._placed(seen, "forward", "input", 1), *self._placed(seen, "forward", "weight", 1)], 1)

    def see_backward(self, forwards: Sequence[Sequence[Operand]], seen: Sequence[Operand]) -> None:
        """After the backward pass of a step: the scope that was left last comes first."""
        scopes, gradients = len(forwards), list[Placed]()
        for product, tensor in AGAIN.items():
            before = [one for scope in forwards for one in scope if one.tensor == tensor]
            for (_, layer, _, operand), given in zip(self._placed(seen, product, tensor, scopes), before, strict=False):
                first, second = ((float(one.scale_inverse), float(one.amax)) for one in (given, operand))
                if first != second:
                    said = f"scale and amax were {first} forward, {second} backward"
                    self.found[layer.name, tensor].wrong.setdefault("kept", said)
            gradients += self._placed(seen, product, "gradient", scopes)
        self._see(False, gradients, scopes)

    def _placed(self, seen: Sequence[Operand], product: Product, tensor: Tensor, scopes: int) -> list[Placed]:
        """Operands with where they belong: calls come in the order of the scopes, and backward in reverse.

        Experts that are one call lie in it in their own order, either way.
        """
        spots = [
            (scope, layer, gemm) for scope in range(scopes) for layer in self._calls for gemm in range(layer.gemms)
        ]
        found = [one for one in seen if one.product == product and one.tensor == tensor]
        calls = [list(group) for _, group in groupby(found, key=lambda one: one.call)]
        flat = [one for group in (calls if product == "forward" else reversed(calls)) for one in group]
        if len(flat) != len(spots) or any(one.scale_inverse is None or one.amax is None for one in flat):
            kinds = ", ".join(sorted({f"{one.kind} {one.format}" for one in flat})) or "none"
            self.missing = self.missing or f"{product}.{tensor}: {len(flat)} of {len(spots)} with a scale: {kinds}"
            return []
        return [(*spot, operand) for spot, operand in zip(spots, flat, strict=True)]

    def _see(self, forward: bool, placed: Sequence[Placed], scopes: int) -> None:
        """The state of each layer in one direction, after as many updates as there were scopes."""
        if self.missing:
            return
        for layer in self._layers:
            updates = [defaultdict[int, list[Operand]](list) for _ in range(scopes)]
            for scope, owner, gemm, operand in placed:
                if owner is layer:
                    column = (3 if forward else 2) * gemm + (operand.tensor == "weight")
                    updates[scopes - 1 - scope][column].append(operand)
            self._hold(layer, forward, updates)

    def _hold(self, layer: ScopeLayer, forward: bool, updates: Sequence[Mapping[int, Sequence[Operand]]]) -> None:
        state, after = self.read(layer.name, layer.module, forward)
        for number, update in enumerate(updates):
            newest = after.history[max(-LENGTH, number - len(updates))]
            for column, operands in update.items():
                found, scale = self.found[layer.name, operands[0].tensor], state.scale[column]
                _hold_operands(found, column, operands, float(newest[column]), scale, FORMATS[forward])
            state = self.next(state, newest, forward)
        for column, operands in updates[0].items():
            self.found[layer.name, operands[0].tensor].hold(after, state, column, f"column {column} of the state")

    def check(self, name: str) -> None:
        """Everything that was seen."""
        why, kept = "1 / scale in fp32, of a scale that may be a unit off", ("amax", "history", "kept")
        of_tensor: dict[Tensor, tuple[str, ...]] = {"input": kept, "weight": kept, "gradient": kept[:2]}
        for layer in self._layers:
            for tensor, others in of_tensor.items():
                found, where = self.found[layer.name, tensor], f"{name}.{layer.name}.{tensor}"
                found.check(self.bench, where, ULPS_OF_A_PRODUCT, why, *others)


def _hold_operands(
    found: Found, column: int, operands: Sequence[Operand], amax: float, scale: Any, kind: FormatName
) -> None:
    """Each product took the state's scale; the largest cast is the cast of the amax that the history took in."""
    for one in operands:
        found.hold_scale(float(one.scale_inverse), float((1.0 / scale).float()), f"column {column}, {one.product}")
    cast_amax, multiplier = max(float(one.amax) for one in operands), float(scale)
    slack = max(HALF_UNIT[kind] * amax, HALF_SUBNORMAL[kind] / multiplier)
    saturated = cast_amax * multiplier >= LARGEST[kind] * (1 - 2.0**-8)
    if not (amax + slack >= cast_amax if saturated else abs(cast_amax - amax) <= slack):
        said = f"column {column}: the history took in {amax:.6g}, what was cast has {cast_amax:.6g} +- {slack:.3g}"
        found.wrong.setdefault("amax", said)
