"""Delayed scaling over several layers in one scope, and several scopes a step: each operand by its own scale and amax.

What a product was given is read off the product (`quantizers`), and held to the state of the very tensor that it should
have been cast by: its scale before the call, and the amax that the state took in. So no operand may borrow another's
quantizer, and each history moves on once a scope, whatever number of layers it holds. A layer that is called twice in a
scope tells that also where a kernel leaves histories alone that saw nothing.

Layers of every kind that share scopes of delayed scaling, each operand of its own size, so that mix-ups show.

Reading back the state of delayed scaling that a layer of Transformer Engine saved.

Delayed scaling saved in the middle of a run and loaded: what goes on is, bit by bit, what was never interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Final

import torch

from ...evidence.receipt import Check, Part
from ..bench import Bench
from ..emulation import LARGEST, Product
from ..memory import Enter
from ..references.delayed_scaling import DelayedRule, DelayedTensors, Update, new_state, next_state
from .quantizers import Operand, Tensor, watching_operands
from .state import ulps

ROWS: Final = 32  # of a call, or of an expert; FP8 products take multiples of 16
WIDTH: Final = 64
OUT: Final = 96
EXPERTS: Final = 3
# Steps between experts: operands of one state lie apart by more than the half unit of E5M2, 1/8.
ROWS_APART: Final = 4.0
WEIGHTS_APART: Final = 64.0
GRADIENTS_APART: Final = 8.0


@dataclass(frozen=True)
class ScopeLayer:
    """One layer.

    Attributes:
        name: for the checks.
        module: of Transformer Engine.
        gemms: G, products of its forward pass; expert or place of each is its index.
        splits: rows of each expert; empty where there is one group.
        out: features of its output.
    """

    name: str
    module: Any
    gemms: int
    out: int
    splits: tuple[int, ...] = ()

    def rows(self, bench: Bench, factor: float) -> Any:
        """[R, WIDTH] bf16, a leaf."""
        return self._sample(bench, WIDTH, factor, ROWS_APART).requires_grad_()

    def gradient(self, bench: Bench, factor: float) -> Any:
        """[R, out] bf16, of the output."""
        return self._sample(bench, self.out, factor, 1.0 / GRADIENTS_APART)

    def __call__(self, rows: Any) -> Any:
        """[R, WIDTH] -> [R, out]."""
        return self.module(rows, list(self.splits)) if self.splits else self.module(rows)

    def _sample(self, bench: Bench, width: int, factor: float, apart: float) -> Any:
        groups = [
            bench.randn(count, width, dtype=torch.bfloat16) * (factor * apart**index)
            for index, count in enumerate(self.splits or (ROWS,))
        ]
        return torch.cat(groups)


def new_layers(bench: Bench) -> Sequence[ScopeLayer]:
    """`Linear`, `LayerNormLinear`, `LayerNormMLP` and `GroupedLinear`, with weights of their own."""
    te, common = bench.bridge("imports"), {"bias": False, "params_dtype": torch.bfloat16, "device": bench.device}
    norm = {"normalization": "RMSNorm", "eps": 1e-5, **common}
    layers = (
        ScopeLayer("linear", te.linear.require()(WIDTH, OUT, **common), 1, OUT),
        ScopeLayer("norm-linear", te.layernorm_linear.require()(WIDTH, OUT, **norm), 1, OUT),
        ScopeLayer(
            "mlp",
            te.layernorm_mlp.require()(hidden_size=WIDTH, ffn_hidden_size=OUT, activation="swiglu", **norm),
            2,
            WIDTH,
        ),
        ScopeLayer(
            "experts", te.grouped_linear.require()(EXPERTS, WIDTH, OUT, **common), EXPERTS, OUT, (ROWS,) * EXPERTS
        ),
    )
    with torch.no_grad():
        for layer in layers:
            weights = [value for value in layer.module.parameters() if value.dim() > 1]
            for index, weight in enumerate(weights):
                size = weight.shape[-1] ** -0.5 * WEIGHTS_APART**index
                weight.copy_(bench.randn(*weight.shape, scale=size))
    return layers


# Steps: the factor of the tensors of each of its scopes. The spike stays in the history for what comes after it.
STEPS: Final = ((1.0,), (0.5,), (16.0, 2.0), (1.0, 4.0))
# The scale before the call is known; its inverse is a division, which may be a unit off, and after the first of two
# backward updates the scale itself is re-computed, which may be one more.
ULPS: Final = 2.0
# The amax that a state takes in is of the values before the cast, what a product has is after it: half a unit of the
# format apart, relative, or half of its smallest subnormal. A norm or an activation that casts by itself may round
# to bf16 in between: 2^-8 covers that rounding twice over.
HALF_UNIT: Final = {"e4m3": 2.0**-4 + 2.0**-8, "e5m2": 2.0**-3 + 2.0**-8}
HALF_SUBNORMAL: Final = {"e4m3": 2.0**-10, "e5m2": 2.0**-17}
# Two operands whose scales are nearer than that could take each other's amax unseen.
APART: Final = 1.3
LENGTH: Final = 16
Spot = tuple[int, int, int]
"""Scope of the step, call in it, product of the call."""


@dataclass(frozen=True)
class _Used:
    """An operand, with the column of the state that it belongs to."""

    column: int
    tensor: Tensor
    operand: Operand


def check_scopes(bench: Bench, enter: Enter, *, update: Update, name: str, length: int = LENGTH) -> None:
    """Run layers of every kind together, and hold the state of every operand to what its products were given.

    The checks are `NAME.products`, `NAME.updates.WAY`, and of each layer `NAME.LAYER.TENSOR.scale`, `.amax`, `.history`
    and `.kept`, that the backward pass multiplies the very values of the forward one; `NAME.LAYER.distinct` says that
    no two operands of a state have scales so near that one could stand for the other.

    Args:
        bench: of the probe.
        enter: makes the scope of the recipe: delayed scaling, HYBRID, algorithm "max".
        update: what brings the state up to date.
        name: of the checks.
        length: H, calls that the recipe remembers.
    """
    layers = new_layers(bench)
    calls = (*range(len(layers)), 0)  # the first one again: both of its calls are one entry of its history
    follower = _Follower(bench.bridge("fp8_scope").te_amax_state, layers, calls, update, length)
    counts: dict[bool, int] = {True: 0, False: 0}
    wanted = 0
    with _counting_updates(bench.bridge("imports").fp8_state_manager.require(), counts):
        for factors in STEPS:
            wanted += len(factors)
            _run_step(bench, enter, layers, calls, factors, follower)
    bench.check(f"{name}.products", not follower.missing, follower.missing or "each product was seen once")
    for way, seen in counts.items():
        words = "forward" if way else "backward"
        bench.check(f"{name}.updates.{words}", seen == wanted, f"{seen} updates in {wanted} scopes")
    bench.checks += follower.checks(name)


@contextmanager
def _counting_updates(manager: Any, counts: dict[bool, int]) -> Iterator[None]:
    """Count how often Transformer Engine brings its states up to date, by direction."""
    method = "reduce_and_update_fp8_tensors"
    plain, own = getattr(manager, method), vars(manager)[method]

    def counted(forward: bool = True) -> Any:
        counts[forward] += 1
        return plain(forward=forward)

    setattr(manager, method, staticmethod(counted))
    try:
        yield
    finally:
        setattr(manager, method, own)


def _run_step(
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


class _Follower:
    """Holds the states of all layers to the operands that products were given."""

    def __init__(
        self, read: Any, layers: Sequence[ScopeLayer], calls: Sequence[int], update: Update, length: int
    ) -> None:
        self._read, self._layers, self._calls, self._length = read, layers, calls, length
        self._rules = {way: DelayedRule(LARGEST[_format(way)], update=update) for way in (True, False)}
        self._states: dict[tuple[int, bool], DelayedTensors] = {}
        self._wrong: dict[tuple[int, Tensor, str], str] = {}
        self._ulps: dict[tuple[int, Tensor], float] = {}
        self._used: dict[tuple[int, bool], set[int]] = {}
        self.missing = ""

    def see_forward(self, seen: Sequence[Operand]) -> None:
        """After a scope."""
        spots = self._spots(1)
        tensors: tuple[Tensor, ...] = ("input", "weight")
        placed = {tensor: self._placed(seen, "forward", tensor, spots) for tensor in tensors}
        if self.missing:
            return
        for layer in range(len(self._layers)):
            used = [
                _Used(3 * gemm + (tensor == "weight"), tensor, operand)
                for tensor, operands in placed.items()
                for (_, call, gemm), operand in operands.items()
                if self._calls[call] == layer
            ]
            self._hold(layer, True, [used])

    def see_backward(self, forwards: Sequence[Sequence[Operand]], seen: Sequence[Operand]) -> None:
        """After the backward pass of a step: the scope that was left last comes first."""
        spots = self._spots(len(forwards))
        ways: tuple[tuple[Product, Tensor], ...] = (("dgrad", "weight"), ("wgrad", "input"))
        before: dict[Tensor, list[Operand]] = {
            tensor: [one for scope in forwards for one in scope if one.tensor == tensor] for _, tensor in ways
        }
        for product, tensor in ways:
            for spot, operand in self._placed(seen, product, tensor, spots).items():
                self._hold_kept(self._calls[spot[1]], tensor, before[tensor][spots.index(spot)], operand)
        gradients = [self._placed(seen, product, "gradient", spots) for product, _ in ways]
        if self.missing:
            return
        for layer in range(len(self._layers)):
            updates = [
                [
                    _Used(2 * gemm, "gradient", operand)
                    for operands in gradients
                    for (scope, call, gemm), operand in operands.items()
                    if scope == number and self._calls[call] == layer
                ]
                for number in reversed(range(len(forwards)))
            ]
            self._hold(layer, False, updates)

    def _spots(self, scopes: int) -> list[Spot]:
        """All products of a step in the order of its forward passes."""
        return [
            (scope, call, gemm)
            for scope in range(scopes)
            for call, layer in enumerate(self._calls)
            for gemm in range(self._layers[layer].gemms)
        ]

    def _placed(
        self, seen: Sequence[Operand], product: Product, tensor: Tensor, spots: Sequence[Spot]
    ) -> dict[Spot, Operand]:
        """Operands by where they belong: calls come in the order of the scopes, and backward in reverse.

        Experts that are one call lie in it in their own order, either way.
        """
        found = [one for one in seen if one.product == product and one.tensor == tensor]
        calls = [list(group) for _, group in groupby(found, key=lambda one: one.call)]
        flat = [one for group in (calls if product == "forward" else reversed(calls)) for one in group]
        if len(flat) != len(spots) or any(one.scale_inverse is None or one.amax is None for one in flat):
            kinds = ", ".join(sorted({f"{one.kind} {one.format}" for one in flat})) or "none"
            self.missing = self.missing or f"{product}.{tensor}: {len(flat)} of {len(spots)} with a scale: {kinds}"
            return {}
        return dict(zip(spots, flat, strict=True))

    def _hold_kept(self, layer: int, tensor: Tensor, given: Operand, again: Operand) -> None:
        pair = [(float(one.scale_inverse), float(one.amax)) for one in (given, again)]
        if pair[0] != pair[1]:
            self._say(layer, tensor, "kept", f"scale and amax were {pair[0]} forward, {pair[1]} backward")

    def _hold(self, layer: int, forward: bool, updates: Sequence[Sequence[_Used]]) -> None:
        """One state after as many updates as there were scopes."""
        module, rule = self._layers[layer].module, self._rules[forward]
        history, scale = (tensor.detach().cpu().double().clone() for tensor in self._read(module, forward=forward))
        state = self._states.get((layer, forward)) or new_state(self._length, scale.numel())
        after = self._states[layer, forward] = DelayedTensors(history, scale)
        tensors: Mapping[int, Tensor] = {one.column: one.tensor for update in updates for one in update}
        self._used[layer, forward] = set(tensors)
        if history.shape != state.history.shape:
            for tensor in dict.fromkeys(tensors.values()):
                self._say(layer, tensor, "history", f"is {tuple(history.shape)}, not {tuple(state.history.shape)}")
            return
        for number, update in enumerate(updates):
            newest = history[max(-self._length, number - len(updates))]
            self._hold_scales(layer, update, state)
            self._hold_amax(layer, update, newest, state, forward)
            state = next_state(state, newest, rule)
        for column, tensor in tensors.items():
            seen, wanted = history[:, column].tolist(), state.history[:, column].tolist()
            if seen != wanted:
                self._say(layer, tensor, "history", f"column {column}: seen {seen[::-1]}, wanted {wanted[::-1]}")
            off = ulps(float(after.scale[column]), float(state.scale[column]))
            self._off(layer, tensor, off, f"column {column}: the state's scale is {float(after.scale[column]):.9g}")

    def _hold_scales(self, layer: int, update: Sequence[_Used], state: DelayedTensors) -> None:
        for one in update:
            wanted = float((1.0 / state.scale[one.column]).float())
            off = ulps(float(one.operand.scale_inverse), wanted)
            said = f"column {one.column}: {one.operand.product} took {float(one.operand.scale_inverse):.9g}"
            self._off(layer, one.tensor, off, f"{said}, the state says {wanted:.9g}")

    def _hold_amax(
        self, layer: int, update: Sequence[_Used], newest: Any, state: DelayedTensors, forward: bool
    ) -> None:
        """The largest of a column's casts is the cast of the amax that its history took in."""
        kind = _format(forward)
        for column in sorted({one.column for one in update}):
            used = [one for one in update if one.column == column]
            cast, amax = max(float(one.operand.amax) for one in used), float(newest[column])
            scale = float(state.scale[column])
            slack = max(HALF_UNIT[kind] * amax, HALF_SUBNORMAL[kind] / scale)
            saturated = cast * scale >= LARGEST[kind] * (1 - 2.0**-8)
            if not (amax + slack >= cast if saturated else abs(cast - amax) <= slack):
                said = f"column {column}: the history took in {amax:.6g}, what was cast has {cast:.6g} +- {slack:.3g}"
                self._say(layer, used[0].tensor, "amax", said)

    def _off(self, layer: int, tensor: Tensor, off: float, said: str) -> None:
        if off > self._ulps.setdefault((layer, tensor), 0.0):
            self._ulps[layer, tensor] = off
            self._wrong[layer, tensor, "scale"] = said

    def _say(self, layer: int, tensor: Tensor, what: str, said: str) -> None:
        self._wrong.setdefault((layer, tensor, what), said)

    def checks(self, name: str) -> Iterator[Check]:
        """Of everything that was seen."""
        tensors: tuple[Tensor, ...] = ("input", "weight", "gradient")
        for layer, one in enumerate(self._layers):
            for tensor in tensors:
                off = self._ulps.get((layer, tensor), float("inf"))
                part = Part("ulps", off, ULPS, off <= ULPS, "1 / scale in fp32, of a scale that may be a unit off")
                where = f"{name}.{one.name}.{tensor}"
                yield Check(f"{where}.scale", part.passed, (part,), self._wrong.get((layer, tensor, "scale"), ""))
                for what in ("amax", "history", *(() if tensor == "gradient" else ("kept",))):
                    said = self._wrong.get((layer, tensor, what), "")
                    yield Check(f"{where}.{what}", not said, detail=said or "as re-computed from what was cast")
            near = "; ".join(filter(None, (self._near(layer, way) for way in (True, False))))
            yield Check(f"{name}.{one.name}.distinct", not near, detail=near or "each operand has a scale of its own")

    def _near(self, layer: int, forward: bool) -> str:
        state = self._states.get((layer, forward))
        if state is None:
            return "no state was seen"
        scales = sorted(float(state.scale[column]) for column in self._used[layer, forward])
        pairs = [(low, high) for low, high in pairwise(scales) if high < low * APART]
        return f"{'forward' if forward else 'backward'} scales {pairs} are too near to be told apart" if pairs else ""


def _format(forward: bool) -> Any:
    return "e4m3" if forward else "e5m2"


# Since 2.17 that state, which is a pickle, is read back only with this; a probe wrote it itself.
UNPICKLING: Final = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


@contextmanager
def unpickling_allowed(variables: MutableMapping[str, str]) -> Iterator[None]:
    """Transformer Engine reads its pickled state back; what was set before is put back.

    Args:
        variables: of the environment of this process, which it asks at each load.
    """
    before = variables.get(UNPICKLING)
    variables[UNPICKLING] = "1"
    try:
        yield
    finally:
        if before is None:
            del variables[UNPICKLING]
        else:
            variables[UNPICKLING] = before


BEFORE: Final = (1.0, 16.0, 0.5)  # a spike in the history: its scales are not those of the next step
ELSEWHERE: Final = (0.25,)  # what the one that is loaded into went through
AFTER: Final = (2.0, 0.125)
WAYS: Final = {"forward": True, "backward": False}


def check_resumed(bench: Bench, enter: Enter, *, name: str) -> None:
    """Go on with layers of every kind, and with those that took over what they saved.

    The checks are `NAME.HOW.LAYER.loaded`, the state right after loading, `.step`, output and all gradients of the
    steps after it, and `.state`, histories and scales after them. HOW: "fresh" layers have never run, "used" ones have
    a state of their own, all of which is to be replaced.

    Args:
        bench: of the probe.
        enter: makes the scope of the recipe: delayed scaling.
        name: of the checks.
    """
    for how in ("fresh", "used"):
        layers, others = new_layers(bench), new_layers(bench)
        for factor in BEFORE:
            _step(bench, enter, [layers], factor)
        if how == "used":
            for factor in ELSEWHERE:
                _step(bench, enter, [others], factor)
        source, target = (torch.nn.ModuleList([one.module for one in row]) for row in (layers, others))
        saved = {key: value.clone() if hasattr(value, "clone") else value for key, value in source.state_dict().items()}
        with unpickling_allowed(os.environ):
            bench.bridge("extra_state").load_fp8_state_dict(target, saved, recipe="delayed")
        read = bench.bridge("fp8_scope").te_amax_state
        for one, other in zip(layers, others, strict=True):
            _same(bench, f"{name}.{how}.{one.name}.loaded", *(list(_state(read, row.module)) for row in (one, other)))
        # Both in one scope: where it ends, every layer of the process is brought up to date.
        results = [_step(bench, enter, [layers, others], factor) for factor in AFTER]
        for index, (one, other) in enumerate(zip(layers, others, strict=True)):
            whole = [[tensor for result in results for tensor in result[row][index]] for row in (0, 1)]
            _same(bench, f"{name}.{how}.{one.name}.step", *whole)
            _same(bench, f"{name}.{how}.{one.name}.state", *(list(_state(read, row.module)) for row in (one, other)))


def _step(bench: Bench, enter: Enter, rows_of_layers: Sequence[Sequence[ScopeLayer]], factor: float) -> Any:
    """The same step of each row of layers, in one scope: output and gradients by row and layer."""
    given = [(one.rows(bench, factor), one.gradient(bench, factor)) for one in rows_of_layers[0]]
    leaves = [[rows.detach().clone().requires_grad_() for rows, _ in given] for _ in rows_of_layers]
    with enter():
        outs = [
            [one(leaf) for one, leaf in zip(layers, of_row, strict=True)]
            for layers, of_row in zip(rows_of_layers, leaves, strict=True)
        ]
    gradients = [gradient for _ in rows_of_layers for _, gradient in given]
    torch.autograd.backward([out for row in outs for out in row], gradients)
    found = [
        [
            [out.detach(), leaf.grad, *(weight.grad for weight in one.module.parameters())]
            for one, leaf, out in zip(*row, strict=True)
        ]
        for row in zip(rows_of_layers, leaves, outs, strict=True)
    ]
    for layers in rows_of_layers:
        for one in layers:
            one.module.zero_grad(set_to_none=True)
    return found


def _state(read: Callable[..., Any], module: Any) -> Iterator[Any]:
    """Histories and scales of both directions; nothing where the layer has none."""
    for way in WAYS.values():
        if ("scaling_fwd" if way else "scaling_bwd") in module.fp8_meta:
            yield from (tensor.detach().clone() for tensor in read(module, forward=way))


def _same(bench: Bench, name: str, wanted: Sequence[Any], seen: Sequence[Any]) -> None:
    off = [index for index, pair in enumerate(zip(wanted, seen, strict=False)) if not _equal(*pair)]
    right = len(wanted) == len(seen) and bool(wanted) and not off
    said = f"{len(off)} of {len(wanted)} tensors differ, {len(seen)} were seen; the first is number {off[:1]}"
    bench.check(name, right, f"{len(wanted)} tensors, bit by bit" if right else said)


def _equal(wanted: Any, seen: Any) -> bool:
    return wanted is not None and seen is not None and wanted.shape == seen.shape and torch.equal(wanted, seen)
