"""Layers whose heads are split over two ranks, beside the same layer whole: what ranks of `test_tensor_layers` run.

Every rank has the whole layer too, so that nothing is sent to be compared. What is told of a tensor is how far the
split layer's is from the whole layer's, over the bound.

The bound: both compute the same terms, summed in another order, in fp64. How a layer magnifies a rounding error is seen
in itself: the whole layer in fp32, from the same numbers, is off by e; each fp64 run is then off by about
e * 2^-53 / 2^-24, and two of them by twice that. A tensor's largest error varies from run to run, and is least certain
where it has few elements: a factor of 8, and e is never taken below half a unit of fp32 in the largest element.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from megacpp_validate.bridge.features import PRESETS
from megacpp_validate.native.rope import rope_tables
from megacpp_validate.training.first_weights import build_layer, first_weights
from megacpp_validate.training.layers import Build
from megacpp_validate.training.parallel import tensor_layers
from megacpp_validate.training.parallel.plan import ParallelPlan, Spread
from megacpp_validate.training.parallel.replicas import reduce_split_gradients, split_parameters
from megacpp_validate.training.parallel.tensor_layers import build_split_layer
from megacpp_validate.training.parallel.tensor_weights import (
    Cut,
    cut_state,
    join_states,
    plan_cuts,
    share_parameters,
)
from megacpp_validate.training.sizes import read_size

SIZE = read_size("tiny", num_heads=4, num_gqa_groups=2, recurrent_heads=4, length=8, chunk=4)
BATCH, LENGTH, SEED = 2, 8, 3
SLACK = 8 * 2 * 2.0**-29
PLAIN = Build(PRESETS["off"], torch.float64, "cpu")


def run_layer(layer: Any, dtype: Any, positions: range = range(LENGTH)) -> dict[str, Any]:
    """Output and gradients: of rows, and of every weight under its native name."""
    drawn = torch.Generator().manual_seed(5)
    rows, cotangent = (torch.randn(BATCH, LENGTH, SIZE.hidden, generator=drawn).to(dtype) for _ in range(2))
    here = slice(positions.start, positions.stop)
    rows = rows[:, here].clone().requires_grad_()
    out = layer(rows, rope_tables(LENGTH, SIZE.head_dim, dtype=torch.float64)).rows
    (out * cotangent[:, here]).sum().backward()
    return {"out": out.detach(), "rows": rows.grad, **native_gradients(layer)}


def native_gradients(layer: Any) -> dict[str, Any]:
    """By the names of its weights: the layer itself says how its parameters make them."""
    kept = {name: one.detach().clone() for name, one in layer.named_parameters()}
    with torch.no_grad():
        for one in layer.parameters():
            one.copy_(one.grad)
        gradients = layer.native_state_dict()
        for name, one in layer.named_parameters():
            one.copy_(kept[name])
    return gradients


class WholeAndSplit:
    """A layer on one rank and on two; what is split is in `dtype`."""

    dtype = torch.float64

    def __init__(self, letter: Any, *, sequence_parallel: bool) -> None:
        self.letter, self.rank = letter, distributed.get_rank()
        self.plan = ParallelPlan(world=2, tensor_parallel=2, sequence_parallel=sequence_parallel)
        spread = Spread(self.plan, self.rank, tensor_group=distributed.group.WORLD)
        self.build = replace(PLAIN, spread=spread)
        self.cuts = plan_cuts(letter, SIZE)
        self.positions = self.plan.positions(self.rank, LENGTH)
        self.whole = self._run_whole(torch.float64)
        single = self._run_whole(torch.float32)
        self.bounds = {
            name: SLACK * max(float((single[name].double() - wanted).abs().max()), 2.0**-24 * float(wanted.abs().max()))
            for name, wanted in self.whole.items()
        }

    def _run_whole(self, dtype: Any) -> dict[str, Any]:
        return run_layer(build_layer(self.letter, SIZE, replace(PLAIN, dtype=dtype), seed=SEED, name="one"), dtype)

    def new(self) -> Any:
        return build_split_layer(self.letter, SIZE, self.build, seed=SEED, name="one")

    def run(self, layer: Any, *, reduce: bool = True) -> dict[str, float]:
        """Tensor -> how far it is off, over its bound."""
        seen = run_layer(layer, self.dtype, self.positions)
        if reduce:
            reduce_split_gradients(split_parameters(layer), self.build.spread.tensor_group)
            seen |= native_gradients(layer)
        here = slice(self.positions.start, self.positions.stop)
        mine = {name: self.whole[name][:, here] for name in ("out", "rows")}
        mine |= cut_state({name: self.whole[name] for name in self.cuts}, self.cuts, self.rank, 2)
        return {name: float((seen[name] - mine[name]).abs().max()) / self.bounds[name] for name in mine}


def everything_on_a_rank() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for letter in ("A", "M", "R"):
        for sequence_parallel in (True, False):
            pair = WholeAndSplit(letter, sequence_parallel=sequence_parallel)
            seen[f"{letter}{int(sequence_parallel)}"] = told_of(pair)
    seen["positions not summed on the way back"] = unsummed_rows()
    seen["bf16"] = first_bf16()
    return seen


def told_of(pair: WholeAndSplit) -> dict[str, Any]:
    layer = pair.new()
    told: dict[str, Any] = {
        "off": pair.run(layer),
        "not summed": pair.run(pair.new(), reduce=False),
        "marked": sorted(split_parameters(layer)),
        "shares": sorted(name for name, _ in share_parameters(layer)),
        "choices": layer.choices(),
        "joined": joined(layer, pair),
        "wrong slice": wrong_slice(pair),
    }
    if pair.letter == "M":
        local = pair.new()
        local.mixer.border = LocalMean(pair.build.spread.tensor_group, pair.plan.sequence_parallel)
        told["local mean"] = pair.run(local)
        forward_only = pair.new()
        forward_only.mixer.border = ForwardMean(pair.build.spread.tensor_group, pair.plan.sequence_parallel)
        told["mean summed forward only"] = pair.run(forward_only)
    return told


class LocalMean(tensor_layers.TensorBorder):
    """The planted fault: the gated norm takes this rank's mean for that of all."""

    def sum_inside(self, parts: Any) -> Any:
        return 2 * parts


class ForwardMean(tensor_layers.TensorBorder):
    """The planted fault: what the others' outputs say of this rank's part of the sum is lost."""

    def sum_inside(self, parts: Any) -> Any:
        return tensor_layers._Sum.apply(parts, self.group)


def joined(layer: Any, pair: WholeAndSplit) -> bool:
    """Whether the shares of both ranks make the whole layer's first weights, bit by bit."""
    shares: list[Any] = [None, None]
    distributed.all_gather_object(shares, layer.native_state_dict())
    whole = first_weights(pair.letter, SIZE, pair.build, seed=SEED, name="one")
    made = join_states(shares, pair.cuts)
    return made.keys() == whole.keys() and all(torch.equal(made[name], whole[name]) for name in whole)


def wrong_slice(pair: WholeAndSplit) -> dict[str, float]:
    """The planted fault: the first projection is cut into plain chunks, not by heads."""
    name = "qkv.weight" if pair.letter == "A" else "in_projection.weight"
    whole = first_weights(pair.letter, SIZE, pair.build, seed=SEED, name="one")
    layer = pair.new()
    state = layer.native_state_dict()
    rows, held = len(whole[name]), len(state[name])
    first = pair.rank * (rows - held)  # the last rows of rank 1, the first ones of rank 0
    layer.load_native_state_dict({**state, name: Cut(((rows, False),)).take(whole[name], 0, 1)[first : first + held]})
    return pair.run(layer)


def unsummed_rows() -> dict[str, float]:
    """The planted fault: without sequence parallelism, gradients of rows are not summed where they came in."""
    kept = tensor_layers._Copy.backward
    tensor_layers._Copy.backward = staticmethod(lambda ctx, gradient: (gradient, None))  # type: ignore[method-assign]
    try:
        pair = WholeAndSplit("R", sequence_parallel=False)
        return pair.run(pair.new())
    finally:
        tensor_layers._Copy.backward = kept  # type: ignore[method-assign]


def first_bf16() -> bool:
    """Collectives in bf16: what ranks without sequence parallelism have between layers is the same, bit by bit."""
    plan = ParallelPlan(world=2, tensor_parallel=2)
    spread = Spread(plan, distributed.get_rank(), tensor_group=distributed.group.WORLD)
    layer = build_split_layer("M", SIZE, replace(PLAIN, dtype=torch.bfloat16, spread=spread), seed=SEED, name="one")
    told: list[Any] = [None, None]
    distributed.all_gather_object(told, run_layer(layer, torch.bfloat16))
    whole = ("out", "rows", "in_projection.layer_norm_weight")
    return all(torch.equal(told[0][name], told[1][name]) for name in whole)
