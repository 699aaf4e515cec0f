"""The hybrid model over ranks: FSDP2 over the data group, and layers A, M and R split over a tensor group.

Experts are not sharded: expert parallelism distributes them already, replicated over expert_data. Gradients are summed,
never averaged, since losses are shares.

Layers are split by heads and columns, A by Transformer Engine where possible. Between split layers a rank holds some
positions of each sequence: they are gathered on the way into a layer, and parts are summed and scattered on the way out
(Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2: g and its conjugate).

A norm before a split projection works on this rank's positions, and the directions b and c of M are computed whole for
this rank's heads alone: the gradient of such a weight is a part of the whole on each rank, and is summed over the group
(it is marked). Every parameter is either a share, another one on each rank, or whole on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import distributed, nn
from torch.nn import functional

from ...bridge.backends import Refusal, choose
from ...bridge.features import why_not_te
from ...bridge.fused import compiled_scan
from ...bridge.native_block import BlockShape, why_not_te_block
from ...bridge.parallel_hooks import Cut, block_cuts, cut_state, mark_split, marked, shard_layers
from ...native.block import ABlock
from ...native.mamba import Mamba2Mixer, convolve
from ...native.mlp import MLP, NormMLP
from ...native.norms import NormLinear, RMSNorm
from ..expert_layer import EXPERT
from ..layers import AttentionLayer, Build, Layer, MambaLayer, RecurrentLayer, take_weights
from ..model import HybridModel
from ..optimizer import GradientSums
from ..sizes import Letter, Size
from .checks import gather_parts
from .exchange import Collective
from .plan import MESH_NAMES, ParallelPlan, Spread

# Of a share. Megatron-LM's mark `tensor_model_parallel` does not say so: Transformer Engine puts it on every weight of
# its linear layers, the experts' too, split or not (2.20.2, pytorch/module/grouped_linear.py, reset_parameters).
SHARE_MARK: Final = "megacpp_tensor_share"


@dataclass(frozen=True, eq=False)
class Sharded:
    """A model that was distributed.

    Attributes:
        sums: gradients that the optimizer sums over ranks.
        alike: kind, names of parameters, and the group whose ranks hold bitwise the same of them.
        experts: names of the parameters of experts.
        in_parts: names of those that the tensor group holds in parts.
    """

    sums: GradientSums
    alike: tuple[tuple[str, frozenset[str], Any], ...]
    experts: frozenset[str]
    in_parts: frozenset[str]


def shard_model(model: HybridModel) -> Sharded:
    """Distribute a model in place, as its `build.spread` says."""
    spread, named = model.build.spread, dict(model.named_parameters())
    plan, tensor, tokens, same = spread.plan, spread.tensor_group, spread.token_group, spread.same_experts
    experts = frozenset(name for name in named if EXPERT.match(name))
    # FSDP2 wants one dtype a block; the routers are in fp32, and small: every rank holds them whole.
    routers = frozenset(name for name, one in named.items() if name not in experts and one.dtype != model.build.dtype)
    split = frozenset(marked(model)) - experts - routers
    in_parts = frozenset(marked(model, SHARE_MARK))
    if spread.data_mesh is not None:
        last = [model.layers[-1]] if model.size.mtp else []
        whole = [named[name] for name in experts | routers]
        shard_layers(
            model, model.layers, spread.data_mesh, whole=whole, used_twice=last, methods=["losses"], summed=True
        )
    sums = ((experts, same), (routers, tokens), (split, tensor))
    alike = (
        ("expert", experts, same),
        ("router", routers, tokens),
        ("parameter of a tensor group", frozenset(named) - in_parts - experts - routers, tensor),
    )
    whole_on = {**dict.fromkeys(experts, plan.mesh_shape[0]), **dict.fromkeys(routers, plan.data)}
    copies = {name: whole_on.get(name, 1) * (1 if name in in_parts else plan.tensor_parallel) for name in named}
    return Sharded(
        GradientSums(tuple((names, group) for names, group in sums if names and group is not None), copies),
        tuple(one for one in alike if one[1] and one[2] is not None),
        experts,
        in_parts,
    )


# --- mesh


def make_spread(plan: ParallelPlan, device: str, *, audit: bool = False) -> Spread:
    """Make all groups of a plan: a collective call of the whole world.

    Args:
        plan: one that `refuse_plan` takes.
        device: "cpu" or "cuda".
        audit: as `Spread` has it.
    """
    if plan.world == 1:
        return Spread(plan=plan, audit=audit)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device, plan.mesh_shape, mesh_dim_names=MESH_NAMES)
    shared = plan.world > plan.expert_parallel
    return Spread(
        plan=plan,
        rank=distributed.get_rank(),
        expert_group=mesh.get_group("expert") if plan.expert_parallel > 1 else None,
        tensor_group=mesh.get_group("tensor") if plan.tensor_parallel > 1 else None,
        token_group=distributed.group.WORLD,
        same_experts=mesh["expert_data", "tensor"]._flatten().get_group() if shared else None,
        data_mesh=mesh["expert_data", "expert"]._flatten("data") if plan.data > 1 else None,
        audit=audit,
    )


# --- layers over a tensor group


def build_split_layer(letter: Letter, size: Size, build: Build, whole: Mapping[str, Any]) -> Any:
    """This rank's part of a layer, called as layer(rows, rope) with rows [B, T / tp, hidden] and rope for all T
    positions.

    Args:
        letter, size, build: as `model.build_layer` takes them; `build.spread` has the plan.
        whole: first weights of the whole layer, of which this rank takes its share.

    Raises:
        BridgeError: what the bridge refuses to build.
    """
    spread = build.spread
    rank, ranks = spread.plan.place(spread.rank).tensor, spread.plan.tensor_parallel
    share = cut_weights(letter, size, whole, rank, ranks)
    if letter == "M":
        return SplitMambaLayer(size, build, share)
    layer = SplitAttentionLayer(size, build) if letter == "A" else SplitRecurrentLayer(size, build)
    layer.load_native_state_dict(share)
    return layer


def cuts_of(letter: Letter, size: Size) -> dict[str, Cut]:
    """The weights of a layer that ranks have shares of, under native names; M's under those of `SplitMambaMixer`."""
    if letter == "A":
        heads, groups = size.num_heads, size.num_gqa_groups
        return block_cuts(BlockShape(size.hidden, size.ffn_hidden, heads, groups, size.head_dim, gated=True))
    rows: dict[str, tuple[int, ...]]
    if letter == "R":
        heads = size.recurrent_heads
        keys, inner = heads * size.recurrent_key_dim, heads * size.recurrent_value_dim
        rows = {"in_projection.weight": (keys, keys, inner, inner, heads, heads), "norm_weight": (inner,)}
        rows |= {"input_bias": (heads,), "forget_bias": (heads,)}
    else:
        inner = 2 * size.hidden
        heads = inner // size.mamba_head_dim
        rows = {"in_share": (inner, inner, heads), **dict.fromkeys(("a_log", "skip", "dt_bias"), (heads,))}
        rows |= dict.fromkeys(("conv_weight", "conv_bias", "norm_weight"), (inner,))
    return {**{name: (0, parts) for name, parts in rows.items()}, "out_projection.weight": (1, (inner,))}


def cut_weights(letter: Letter, size: Size, state: Mapping[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """One rank's share of the native weights of a whole layer; M's under the names of `SplitMambaMixer`."""
    whole = dict(state)
    if letter == "M":
        inner, steps = 2 * size.hidden, 2 * size.hidden // size.mamba_head_dim
        projected = whole.pop("in_projection.weight").split([inner, inner, 2 * size.mamba_state, steps])
        whole["in_share"], whole["in_directions"] = torch.cat([*projected[:2], projected[3]]), projected[2]
        whole["norm.weight"] = whole.pop("in_projection.layer_norm_weight")
        for name in ("conv_weight", "conv_bias"):
            whole[name], whole[f"directions_{name}"] = state[name][:inner], state[name][inner:]
    return cut_state(whole, cuts_of(letter, size), rank, ranks)


def _mark(layer: Any, in_parts: list[Any]) -> None:
    """Mark parameters that are whole, with a part of their gradient on each rank; all others are shares."""
    mark_split(in_parts)
    whole = {id(parameter) for parameter in in_parts}
    for parameter in layer.parameters():
        if id(parameter) not in whole:
            setattr(parameter, SHARE_MARK, True)


# --- where the stream enters and leaves
#
# Collectives under names that torch 2.11 and 2.13 share: those that take a whole tensor were renamed in 2.13.


def enter(rows: Any, group: Any) -> Any:
    """[B, T / tp, hidden] -> [B, T, hidden], on every rank: where the stream enters a layer that is split."""
    return Collective.apply(rows, _gather_positions, _scatter_positions, group)


def leave(parts: Any, group: Any) -> Any:
    """[B, T, hidden] -> [B, T / tp, hidden], the sum over the group: the inverse of `enter`."""
    return Collective.apply(parts, _scatter_positions, _gather_positions, group)


def sum_inside(parts: Any, group: Any) -> Any:
    """The sum of tensors of one shape over the group, which every rank goes on with for its own part.

    Each rank's gradient of the sum is a part too: they are summed on the way back.
    """
    return Collective.apply(parts, _sum_parts, _sum_parts, group)


def _gather_positions(rows: Any, group: Any) -> Any:
    """[B, T / tp, ...] -> [B, T, ...], positions by the order of the ranks."""
    return torch.cat(gather_parts(rows.contiguous(), group), dim=1)


def _scatter_positions(parts: Any, group: Any) -> Any:
    """[B, T, ...] -> [B, T / tp, ...], the sum over the group."""
    each = [part.contiguous() for part in parts.chunk(distributed.get_world_size(group), dim=1)]
    mine = torch.empty_like(each[0])
    distributed.reduce_scatter(mine, each, group=group)
    return mine


def _sum_parts(parts: Any, group: Any) -> Any:
    """The sum over the group, a new tensor."""
    summed = parts.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(summed, group=group)
    return summed


# --- layers


class SplitNormLinear(NormLinear):
    """The norm, then this rank's rows of the projection, over all positions."""

    def __init__(self, hidden: int, width: int, eps: float, group: Any, **made: Any) -> None:
        super().__init__(hidden, width, eps=eps, **made)
        self.group = group

    def forward(self, x: Any) -> Any:
        """[B, T / tp, hidden] -> [B, T, this rank's columns]."""
        return functional.linear(enter(self.norm(x), self.group), self.weight)


class SplitNormMLP(NormMLP):
    """The norm, then this rank's columns of the MLP, summed over the group."""

    group: Any

    def forward(self, x: Any) -> Any:
        """[B, T / tp, hidden] -> the same."""
        return leave(MLP.forward(self, enter(self.norm(x), self.group)), self.group)


class SplitOut(nn.Linear):
    """This rank's columns of an out-projection, summed over the group."""

    def __init__(self, width: int, hidden: int, group: Any, **made: Any) -> None:
        super().__init__(width, hidden, bias=False, **made)
        self.group = group

    def forward(self, x: Any) -> Any:
        """[B, T, this rank's columns] -> [B, T / tp, hidden]."""
        return leave(super().forward(x), self.group)


class SplitAttentionLayer(AttentionLayer):
    """A: this rank's heads and columns of the A-block, of plain layers or of Transformer Engine's."""

    def __init__(self, size: Size, build: Build) -> None:
        ranks = build.spread.plan.tensor_parallel
        refused = why_not_te_block(build.features, build.dtype, build.device)
        if refused is None:
            super().__init__(size, build, tp_size=ranks, tp_group=build.spread.tensor_group, sequence_parallel=True)
        else:
            Layer.__init__(self)
            self.block = _split_block(size, ranks, build)
            self.block.choice = choose("native_block", (("te", lambda: refused), ("native", lambda: None)))
        _mark(self, [one for name, one in self.block.named_parameters() if name.endswith("layer_norm_weight")])


def _split_block(size: Size, ranks: int, build: Build) -> Any:
    """The native block with this rank's widths, whose layers gather and scatter the stream."""
    group = build.spread.tensor_group
    made, heads, groups = build.made, size.num_heads // ranks, size.num_gqa_groups // ranks
    block = ABlock(size.hidden, size.ffn_hidden // ranks, heads, size.head_dim, groups, eps=size.eps, device="meta")
    block.qkv = SplitNormLinear(size.hidden, block.qkv.out_features, size.eps, group, **made)
    block.out = SplitOut(block.out.in_features, size.hidden, group, **made)
    block.mlp = SplitNormMLP(size.hidden, size.ffn_hidden // ranks, eps=size.eps, **made)
    block.mlp.group = group
    return block


class SplitRecurrentLayer(RecurrentLayer):
    """R: this rank's heads of the matrix-state block, residual connection in it."""

    def __init__(self, size: Size, build: Build) -> None:
        heads = size.recurrent_heads // build.spread.plan.tensor_parallel
        super().__init__(size, build, heads=heads)
        block, made, group = self.block, build.made, build.spread.tensor_group
        block.in_projection = SplitNormLinear(size.hidden, sum(block.widths), size.eps, group, **made)
        block.out_projection = SplitOut(heads * size.recurrent_value_dim, size.hidden, group, **made)
        _mark(self, [block.in_projection.layer_norm_weight])


class SplitMambaLayer(MambaLayer):
    """M: this rank's heads of the Mamba-2 mixer, and the residual connection around it."""

    def __init__(self, size: Size, build: Build, share: Mapping[str, Any]) -> None:
        Layer.__init__(self)
        self.mixer = SplitMambaMixer(size, build, share)
        refused = why_not_te(build.features, "mamba_in_projection", build.device) or Refusal(
            "te",
            "tensor-parallel",
            "the in-projection of M has rows that are split over ranks and rows that every rank has, and Transformer "
            "Engine has a layer for either. Next step: tensor_parallel 1, or leave M native",
        )
        self._choices = {"in_projection": choose("layer_spec", (("te", lambda: refused), ("native", lambda: None)))}
        if build.forms.compiled_scan:
            self.mixer.scan, self._choices["scan"] = compiled_scan(build.device)
        _mark(self, [one for name, one in self.mixer.named_parameters() if name not in cuts_of("M", size)])


class SplitMambaMixer(Mamba2Mixer):
    """One rank's heads of `Mamba2Mixer` with one group, with the weights of `cut_weights`.

    Gate, values and steps belong to heads, and a rank has those of its own. The directions b and c are one group's:
    every head reads them, so they are parameters of their own. The gated norm is over the width of all heads: its sum
    of squares is taken over the group.

    Attributes:
        norm: in front, [hidden]; whole.
        in_share: [2 * I + H, hidden], rows of gate, values and steps, with I and H of this rank.
        in_directions: [2 * N, hidden], rows of b and c; whole.
        conv_weight, conv_bias: [I, taps] and [I], of the values.
        directions_conv_weight, directions_conv_bias: [2 * N, taps] and [2 * N]; whole.
        out_projection: `SplitOut`.
    """

    def __init__(self, size: Size, build: Build, share: Mapping[str, Any]) -> None:
        super().__init__(size.hidden // build.spread.plan.tensor_parallel, **size.mixer, device="meta")
        self.group, self.hidden = build.spread.tensor_group, size.hidden
        del self.in_projection
        self.norm = RMSNorm(size.hidden, eps=size.eps, **build.made)
        self.out_projection = SplitOut(self.inner, size.hidden, self.group, **build.made)
        for name, weight in share.items():  # in one order on all ranks: FSDP2 lays parameters out in it
            if "." not in name:
                setattr(self, name, nn.Parameter(weight.clone()))
        take_weights(dict(self.named_parameters()), share)

    def project(self, rows: Any) -> tuple[Any, Any, Any]:
        """[B, T / tp, hidden] -> gate, values with directions, and steps, at all positions."""
        normed = enter(self.norm(rows), self.group)
        gate, values, steps = functional.linear(normed, self.in_share).split([self.inner, self.inner, self.heads], -1)
        values = convolve(values, self.conv_weight, self.conv_bias)
        directions = functional.linear(normed, self.in_directions)
        directions = convolve(directions, self.directions_conv_weight, self.directions_conv_bias)
        return gate, torch.cat([values, directions], dim=-1), steps

    def mean_square(self, gated: Any) -> Any:
        """Over the width of all ranks."""
        return sum_inside(gated.square().sum(dim=-1, keepdim=True), self.group) / (2 * self.hidden)
