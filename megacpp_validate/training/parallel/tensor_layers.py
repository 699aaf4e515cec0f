"""The layers A, M and R split over a tensor group by heads and columns; A by Transformer Engine where possible.

Between split layers a rank holds some positions of each sequence: they are gathered on the way into a layer, and parts
are summed and scattered on the way out (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2: g and its conjugate).

A norm before a split projection works on this rank's positions, and the directions b and c of M are computed whole for
this rank's heads alone: the gradient of such a weight is a part of the whole on each rank, and is summed over the group
(it is marked). Every parameter is either a share, another one on each rank, or whole on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import distributed, nn
from torch.nn import functional

from ...bridge.backends import Refusal, choose
from ...bridge.features import why_not_te
from ...bridge.fused import compiled_scan
from ...bridge.recipes import TE_DTYPES
from ...native.block import ABlock
from ...native.mamba import Mamba2Mixer, convolve
from ...native.mlp import MLP, NormMLP
from ...native.norms import NormLinear, RMSNorm
from ..layers import AttentionLayer, Build, Layer, MambaLayer, RecurrentLayer, take_weights
from ..sizes import Letter, Size
from .checks import gather_parts, mark_split
from .exchange import Collective

# Of a share. Megatron-LM's mark `tensor_model_parallel` does not say so: Transformer Engine puts it on every weight of
# its linear layers, the experts' too, split or not (2.20.2, pytorch/module/grouped_linear.py, reset_parameters).
SHARE_MARK: Final = "megacpp_tensor_share"
TAPS: Final = 4  # of the causal convolution, as `native.mamba.Mamba2Mixer` has them by default


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
    kinds: dict[str, Any] = {"A": SplitAttentionLayer, "M": SplitMambaLayer, "R": SplitRecurrentLayer}
    layer = kinds[letter](size, build)
    rank, ranks = spread.plan.place(spread.rank).tensor, spread.plan.tensor_parallel
    share = cut_weights(letter, size, whole, rank, ranks)
    if letter == "M":
        take_weights(dict(layer.mixer.named_parameters()), share)
    else:
        layer.load_native_state_dict(share)
    return layer


# Weights of which each rank has a share; the others are whole on all of them.
SHARED: Final = {
    "A": ("qkv.weight", "out.weight", "mlp.fc1_weight", "mlp.fc2_weight"),
    "R": ("in_projection.weight", "input_bias", "forget_bias", "norm_weight", "out_projection.weight"),
    "M": ("in_share", "conv_weight", "conv_bias", "a_log", "skip", "dt_bias", "norm_weight", "out_projection.weight"),
}
COLUMNS: Final = ("out.weight", "mlp.fc2_weight", "out_projection.weight")  # split by columns, the others by rows


def cut_weights(letter: Letter, size: Size, state: Mapping[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """One rank's share of the native weights of a whole layer; M's under the names of `SplitMambaMixer`.

    A weight is a row of segments along one axis, such as queries, keys and values: of each a rank has whole heads or
    columns. A plain chunk of the weight would give the first ranks only queries and the last only values.
    """
    queries, groups, width = size.num_heads * size.head_dim, size.num_gqa_groups * size.head_dim, size.ffn_hidden
    heads, inner = size.recurrent_heads, 2 * size.hidden
    keys, values, steps = heads * size.recurrent_key_dim, heads * size.recurrent_value_dim, inner // size.mamba_head_dim
    segments = {
        "qkv.weight": [queries, groups, groups],
        "mlp.fc1_weight": [width, width],
        "in_projection.weight": [keys, keys, values, values, heads, heads],
        "in_share": [inner, inner, steps],
    }

    def share(name: str, weight: Any) -> Any:
        axis = int(name in COLUMNS)
        parts = weight.split(segments.get(name, weight.shape[axis]), dim=axis)
        return torch.cat([part.chunk(ranks, dim=axis)[rank] for part in parts], dim=axis)

    whole = dict(state)
    if letter == "M":
        projected = whole.pop("in_projection.weight").split([inner, inner, 2 * size.mamba_state, steps])
        whole["in_share"], whole["in_directions"] = torch.cat([*projected[:2], projected[3]]), projected[2]
        whole["norm.weight"] = whole.pop("in_projection.layer_norm_weight")
        for name in ("conv_weight", "conv_bias"):
            whole[name], whole[f"directions_{name}"] = state[name][:inner], state[name][inner:]
    return {name: share(name, weight) if name in SHARED[letter] else weight for name, weight in whole.items()}


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
        refused = why_not_te(build.features, "native_block", build.device)
        if refused is None and build.dtype not in TE_DTYPES:
            refused = Refusal("te", "dtype", f"Transformer Engine has no layers in {build.dtype}")
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

    def __init__(self, size: Size, build: Build) -> None:
        Layer.__init__(self)
        self.mixer = SplitMambaMixer(size, build)
        refused = why_not_te(build.features, "mamba_in_projection", build.device) or Refusal(
            "te",
            "tensor-parallel",
            "the in-projection of M has rows that are split over ranks and rows that every rank has, and Transformer "
            "Engine has a layer for either. Next step: tensor_parallel 1, or leave M native",
        )
        self._choices = {"in_projection": choose("layer_spec", (("te", lambda: refused), ("native", lambda: None)))}
        if build.forms.compiled_scan:
            self.mixer.scan, self._choices["scan"] = compiled_scan(build.device)
        _mark(self, [one for name, one in self.mixer.named_parameters() if name not in SHARED["M"]])


class SplitMambaMixer(Mamba2Mixer):
    """One rank's heads of `Mamba2Mixer` with one group; parameters have no values before they are loaded.

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

    def __init__(self, size: Size, build: Build) -> None:
        made, width = build.made, size.hidden // build.spread.plan.tensor_parallel
        super().__init__(
            width,
            state=size.mamba_state,
            head_dim=size.mamba_head_dim,
            chunk=size.chunk,
            eps=size.eps,
            dtype=build.dtype,
            device="meta",
        )
        self.to_empty(device=build.device)
        self.group, self.hidden, directions = build.spread.tensor_group, size.hidden, 2 * size.mamba_state
        del self.in_projection

        def empty(*shape: int) -> Any:
            return nn.Parameter(torch.empty(*shape, **made))

        self.norm = RMSNorm(size.hidden, eps=size.eps, **made)
        self.in_share = empty(2 * self.inner + self.heads, size.hidden)
        self.in_directions = empty(directions, size.hidden)
        self.conv_weight, self.conv_bias = empty(self.inner, TAPS), empty(self.inner)
        self.directions_conv_weight, self.directions_conv_bias = empty(directions, TAPS), empty(directions)
        self.out_projection = SplitOut(self.inner, size.hidden, self.group, **made)

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
