"""The layers A, M and R split over a tensor group by heads and columns; A by Transformer Engine where it may be.

A norm in front of a split projection is computed before the rows of other positions are gathered, as in Megatron-LM: on
this rank's positions with sequence parallelism, and its weight's gradient is then summed over the group (it is marked);
on all positions on every rank without it, and the gradient is whole everywhere, because that of the rows is summed
where they enter the projection. What every rank computes whole for its own heads alone, the directions b and c of M,
has a part of its gradient on each rank either way, and is marked either way. Every parameter is either a share, another
one on each rank, or whole on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ...bridge.backends import Choice, Refusal, choose
from ...bridge.compiled_scan import compiled_scan
from ...bridge.features import why_not_te
from ...bridge.native_block import NativeBlock
from ...bridge.walk_plan import TE_DTYPES
from ...native.block import ABlock
from ...native.mamba import at_least_fp32, ssd_chunked
from ...native.mlp import MLP, NormMLP
from ...native.norms import NormLinear, RMSNorm
from ...native.recurrent import MatrixRecurrentBlock
from ..errors import WrongSize
from ..first_weights import first_weights
from ..layers import Build, Stepped, copy_weights, take_weights
from ..sizes import Letter, Size
from .replicas import mark_split
from .tensor_weights import MAMBA_EXPAND, cut_state, mark_shares, plan_cuts


def build_split_layer(letter: Letter, size: Size, build: Build, *, seed: int, name: str) -> Any:
    """This rank's part of a layer; its first weights are the slices of the whole layer's.

    Called as layer(rows, rope) with rows [B, T / tp, hidden] under sequence parallelism, [B, T, hidden] without, and
    rope for all T positions. Its weights go by native names and are this rank's share, as `plan_cuts` says.

    Args:
        letter, size, build, seed, name: as `first_weights.build_layer` takes them; `build.spread` has the plan.

    Raises:
        WrongSize: a kind of layer that is not split, or a spread without its tensor group.
        BridgeError: what the bridge refuses to build.
    """
    spread = build.spread
    if spread.tensor_group is None:
        raise WrongSize(
            f"a layer {letter} of {spread.plan} has no tensor group. Likely cause: a Spread made by hand. Next step: "
            "take the groups of parallel.mesh.make_groups."
        )
    cuts = plan_cuts(letter, size)
    border = TensorBorder(spread.tensor_group, spread.plan.sequence_parallel)
    with torch.random.fork_rng([build.device] if torch.device(build.device).type == "cuda" else []):
        layer = _SPLIT_LAYERS[letter](size, build, border)
    whole = first_weights(letter, size, build, seed=seed, name=name)
    ranks = spread.plan.tensor_parallel
    layer.load_native_state_dict(cut_state(whole, cuts, spread.plan.place(spread.rank).tensor, ranks))
    return layer


class SplitNormLinear(NormLinear):
    """The norm, then this rank's rows of the projection, over all positions."""

    border: TensorBorder

    def forward(self, x: Any) -> Any:
        """Rows as the stream holds them -> [B, T, this rank's columns]."""
        return functional.linear(self.border.enter(self.norm(x)), self.weight)


class SplitNormMLP(NormMLP):
    """The norm, then this rank's columns of the MLP, summed over the group."""

    border: TensorBorder

    def forward(self, x: Any) -> Any:
        """Rows as the stream holds them -> the same."""
        return self.border.leave(MLP.forward(self, self.border.enter(self.norm(x))))


class SplitAttentionLayer(nn.Module):
    """A: this rank's heads and columns of the A-block, of plain layers or of Transformer Engine's."""

    def __init__(self, size: Size, build: Build, border: TensorBorder) -> None:
        super().__init__()
        ranks, made = build.spread.plan.tensor_parallel, {"dtype": build.dtype, "device": build.device}
        refused = _why_not_te_block(build)
        self._choice = None if refused is None else choose(
            "native_block", (("te", lambda: refused), ("native", lambda: None))
        )  # fmt: skip
        widths = {"num_heads": size.num_heads, "num_gqa_groups": size.num_gqa_groups, "ffn_hidden": size.ffn_hidden}
        if refused is None:
            self.block: Any = NativeBlock(
                hidden=size.hidden,
                head_dim=size.head_dim,
                activation="swiglu",
                eps=size.eps,
                features=build.features,
                tp_size=ranks,
                tp_group=border.group,
                sequence_parallel=border.sequence_parallel,
                **widths,
                **made,
            )
        else:
            self.block = _split_block(size, border, {name: width // ranks for name, width in widths.items()}, made)
        norms = [one for name, one in self.block.named_parameters() if name.endswith("layer_norm_weight")]
        _mark(self, norms if border.sequence_parallel else (), whole=norms)

    def forward(self, rows: Any, rope: tuple[Any, Any]) -> Stepped:
        """Rows as the stream holds them -> the same; `rope` is (cos, sin), each [at least T, D/2]."""
        return Stepped(self.block(rows, rope=rope))

    def choices(self) -> dict[str, Choice]:
        """What the block is made of, or took in its last call."""
        choice = self._choice or self.block.choice
        return {} if choice is None else {"block": choice}

    def native_state_dict(self) -> dict[str, Any]:
        """This rank's share under the names of `native.block.ABlock`."""
        return copy_weights(self.block) if self._choice is not None else self.block.native_state_dict()

    def load_native_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take such weights, exactly."""
        if self._choice is not None:
            take_weights(self.block, state)
        else:
            self.block.load_native_state_dict(state)


class SplitMambaLayer(nn.Module):
    """M: this rank's heads of the Mamba-2 mixer, and the residual connection around it."""

    def __init__(self, size: Size, build: Build, border: TensorBorder) -> None:
        super().__init__()
        self.mixer = SplitMambaMixer(
            size.hidden,
            state=size.mamba_state,
            head_dim=size.mamba_head_dim,
            chunk=size.chunk,
            eps=size.eps,
            dtype=build.dtype,
            device=build.device,
            ranks=build.spread.plan.tensor_parallel,
            border=border,
        )
        refused = why_not_te(build.features, "mamba_in_projection", build.device) or Refusal(
            "te",
            "tensor-parallel",
            "the in-projection of M has rows that each rank shares out and rows that all have, and Transformer Engine "
            "has a layer for either. Next step: expect it in the dtype of its parameters, or set tensor_parallel to 1",
        )
        self._choices = {"in_projection": choose("layer_spec", (("te", lambda: refused), ("native", lambda: None)))}
        if build.forms.compiled_scan:
            self.mixer.scan, self._choices["scan"] = compiled_scan(build.device)
        whole = self.mixer.whole_parameters()
        norms = [self.mixer.norm.weight]
        _mark(self, [*whole, *norms] if border.sequence_parallel else whole, whole=[*whole, *norms])

    def forward(self, rows: Any, rope: tuple[Any, Any]) -> Stepped:  # noqa: ARG002 - every layer is called alike
        """Rows as the stream holds them -> the same."""
        return Stepped(rows + self.mixer(rows))

    def choices(self) -> dict[str, Choice]:
        """Part -> what it is made of."""
        return dict(self._choices)

    def native_state_dict(self) -> dict[str, Any]:
        """This rank's share under the names of `native.mamba.Mamba2Mixer`."""
        return self.mixer.join_parts(copy_weights(self.mixer))

    def load_native_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take such weights, exactly."""
        take_weights(self.mixer, self.mixer.cut_parts(state))


class SplitRecurrentLayer(nn.Module):
    """R: this rank's heads of the matrix-state block, residual connection in it."""

    def __init__(self, size: Size, build: Build, border: TensorBorder) -> None:
        super().__init__()
        made = {"dtype": build.dtype, "device": build.device}
        heads = size.recurrent_heads // build.spread.plan.tensor_parallel
        self.block = MatrixRecurrentBlock(
            size.hidden,
            num_heads=heads,
            key_dim=size.recurrent_key_dim,
            value_dim=size.recurrent_value_dim,
            chunk=size.chunk,
            eps=size.eps,
            **made,
        )
        self.block.in_projection = _split_norm_linear(size.hidden, sum(self.block.widths), size.eps, border, made)
        self.block.out_projection = SplitOut(heads * size.recurrent_value_dim, size.hidden, border, **made)
        norms = [self.block.in_projection.layer_norm_weight]
        _mark(self, norms if border.sequence_parallel else (), whole=norms)

    def forward(self, rows: Any, rope: tuple[Any, Any]) -> Stepped:  # noqa: ARG002 - every layer is called alike
        """Rows as the stream holds them -> the same."""
        return Stepped(self.block(rows))

    def choices(self) -> dict[str, Choice]:
        """It has nothing to choose."""
        return {}

    def native_state_dict(self) -> dict[str, Any]:
        """This rank's share under the names of `native.recurrent.MatrixRecurrentBlock`."""
        return copy_weights(self.block)

    def load_native_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take such weights, exactly."""
        take_weights(self.block, state)


_SPLIT_LAYERS: dict[Letter, type[Any]] = {"A": SplitAttentionLayer, "M": SplitMambaLayer, "R": SplitRecurrentLayer}


def _split_block(size: Size, border: TensorBorder, widths: Mapping[str, Any], made: Mapping[str, Any]) -> Any:
    """The native block with this rank's widths, whose layers meet the stream at the border."""
    block = ABlock(size.hidden, head_dim=size.head_dim, eps=size.eps, **widths, **{**made, "device": "meta"})
    block.qkv = _split_norm_linear(size.hidden, block.qkv.out_features, size.eps, border, made)
    block.out = SplitOut(block.out.in_features, size.hidden, border, **made)
    block.mlp = SplitNormMLP(size.hidden, widths["ffn_hidden"], eps=size.eps, **made)
    block.mlp.border = border
    return block


def _split_norm_linear(hidden: int, width: int, eps: float, border: TensorBorder, made: Mapping[str, Any]) -> Any:
    layer = SplitNormLinear(hidden, width, eps=eps, **made)
    layer.border = border
    return layer


def _why_not_te_block(build: Build) -> Refusal | None:
    refused = why_not_te(build.features, "native_block", build.device)
    if refused is not None or build.dtype in TE_DTYPES:
        return refused
    return Refusal("te", "dtype", f"Transformer Engine has no layers in {build.dtype}")


def _mark(layer: Any, in_parts: Any, *, whole: Any) -> None:
    """Mark what has a part of its gradient on each rank, and what is another share on each."""
    mark_split(in_parts)
    known = {id(parameter) for parameter in whole}
    mark_shares(parameter for parameter in layer.parameters() if id(parameter) not in known)


# --- tensor collectives
#
# How rows come into a layer whose heads and columns are split over a tensor group, and how its parts are summed.
#
# With sequence parallelism a rank holds some positions of each sequence between layers: they are gathered on the way
# in, and parts are summed and scattered on the way out (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2: g
# and its conjugate). Without it every rank holds all positions: nothing moves on the way in, and parts are summed on
# the way out (Shoeybi et al. 2019, arXiv:1909.08053, section 3: f and g). The backward pass of each is the forward
# pass of the other.
#
# Called under names that torch 2.11 and 2.13 both have: those that take a whole tensor were renamed in 2.13.


@dataclass(frozen=True, eq=False)
class TensorBorder:
    """Where the stream meets a layer that is split.

    Attributes:
        group: the tensor group, in the order of the parts.
        sequence_parallel: whether the stream holds this rank's positions only.
    """

    group: Any
    sequence_parallel: bool

    def enter(self, rows: Any) -> Any:
        """[B, T / tp, hidden] or, without sequence parallelism, [B, T, hidden] -> [B, T, hidden], on every rank."""
        return _Gather.apply(rows, self.group) if self.sequence_parallel else _Copy.apply(rows, self.group)

    def leave(self, parts: Any) -> Any:
        """The sum of [B, T, hidden] over the group, as the stream holds it: the inverse way of `enter`."""
        return _Scatter.apply(parts, self.group) if self.sequence_parallel else _Sum.apply(parts, self.group)

    def sum_inside(self, parts: Any) -> Any:
        """The sum of tensors of one shape over the group, which every rank goes on with for its own part.

        Each rank's gradient of the sum is a part too: they are summed on the way back.
        """
        return _SumBothWays.apply(parts, self.group)


def gather_positions(rows: Any, group: Any) -> Any:
    """[B, T / tp, ...] -> [B, T, ...], positions by the order of the ranks; nothing is differentiated."""
    rows = rows.contiguous()
    parts = [torch.empty_like(rows) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(parts, rows, group=group)
    return torch.cat(parts, dim=1)


def scatter_positions(parts: Any, group: Any) -> Any:
    """[B, T, ...] -> [B, T / tp, ...], the sum over the group; nothing is differentiated."""
    each = [part.contiguous() for part in parts.chunk(distributed.get_world_size(group), dim=1)]
    mine = torch.empty_like(each[0])
    distributed.reduce_scatter(mine, each, group=group)
    return mine


def sum_parts(parts: Any, group: Any) -> Any:
    """The sum over the group, a new tensor; nothing is differentiated."""
    summed = parts.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(summed, group=group)
    return summed


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Any, group: Any) -> Any:
        ctx.group = group
        return gather_positions(rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        return scatter_positions(gradient, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Any, group: Any) -> Any:
        ctx.group = group
        return scatter_positions(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        return gather_positions(gradient, ctx.group), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Any, group: Any) -> Any:
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        return sum_parts(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Any, group: Any) -> Any:  # noqa: ARG004 - what autograd calls it with
        return sum_parts(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:  # noqa: ARG004 - as above
        return gradient, None


class _SumBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Any, group: Any) -> Any:
        ctx.group = group
        return sum_parts(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        return sum_parts(gradient, ctx.group), None


# --- tensor mamba
#
# The Mamba-2 mixer with its heads split over a tensor group, and the way out of every split layer.
#
# Gate, values and steps belong to heads, and a rank has those of its own. The directions b and c are one group's: every
# head reads them, so every rank computes them whole, for its heads alone; what a rank learns of their weights is a
# part. They are parameters of their own, so that each parameter is either a share or whole. The gated norm is over
# the width of all heads: its sum of squares is taken over the group.


TAPS = 4  # of the causal convolution, as `native.mamba.Mamba2Mixer` has them by default


class SplitOut(nn.Linear):
    """This rank's columns of an out-projection, summed over the group."""

    def __init__(self, width: int, hidden: int, border: TensorBorder, *, dtype: Any, device: Any) -> None:
        super().__init__(width, hidden, bias=False, dtype=dtype, device=device)
        self.border = border

    def forward(self, x: Any) -> Any:
        """[B, T, this rank's columns] -> [B, T, hidden] as the stream holds it."""
        return self.border.leave(super().forward(x))


class SplitMambaMixer(nn.Module):
    """One rank's heads of `native.mamba.Mamba2Mixer` with one group; parameters have no values before they are loaded.

    Args:
        hidden, state, head_dim, chunk, eps: of the whole mixer.
        dtype, device: of the parameters.
        ranks: of the tensor group.
        border: where the stream meets it.

    Attributes:
        inner, heads: I and H of this rank.
        norm: in front, [hidden]; whole.
        in_share: [2 * I + H, hidden], rows of gate, values and steps.
        in_directions: [2 * N, hidden], rows of b and c; whole.
        conv_weight, conv_bias: [I, taps] and [I], of the values.
        directions_conv_weight, directions_conv_bias: [2 * N, taps] and [2 * N]; whole.
        a_log, skip, dt_bias: [H].
        norm_weight: [I] of the gated norm.
        out_projection: `SplitOut`.
        scan: what is called in the place of `ssd_chunked`; None is `ssd_chunked`.
    """

    def __init__(
        self,
        hidden: int,
        *,
        state: int,
        head_dim: int,
        chunk: int,
        eps: float,
        dtype: Any,
        device: Any,
        ranks: int,
        border: TensorBorder,
    ) -> None:
        super().__init__()
        made = {"dtype": dtype, "device": device}
        self.whole_inner = MAMBA_EXPAND * hidden
        self.inner = inner = self.whole_inner // ranks
        self.heads = heads = inner // head_dim
        self.head_dim, self.state, self.chunk, self.eps, self.border = head_dim, state, chunk, eps, border
        self.scan: Any = None

        def empty(*shape: int) -> Any:
            return nn.Parameter(torch.empty(*shape, **made))

        self.norm = RMSNorm(hidden, eps=eps, **made)
        self.in_share, self.in_directions = empty(2 * inner + heads, hidden), empty(2 * state, hidden)
        self.conv_weight, self.conv_bias = empty(inner, TAPS), empty(inner)
        self.directions_conv_weight, self.directions_conv_bias = empty(2 * state, TAPS), empty(2 * state)
        self.a_log, self.skip, self.dt_bias = empty(heads), empty(heads), empty(heads)
        self.norm_weight = empty(inner)
        self.out_projection = SplitOut(inner, hidden, border, **made)

    def forward(self, rows: Any) -> Any:
        """Rows as the stream holds them -> the same, without the residual connection."""
        normed = self.border.enter(self.norm(rows))
        gate, values, steps = functional.linear(normed, self.in_share).split([self.inner, self.inner, self.heads], -1)
        directions = functional.linear(normed, self.in_directions)
        values = _convolve(values, self.conv_weight, self.conv_bias).unflatten(-1, (self.heads, self.head_dim))
        directions = _convolve(directions, self.directions_conv_weight, self.directions_conv_bias)
        ins, outs = directions.unsqueeze(2).split(self.state, dim=-1)
        y, _ = (self.scan or ssd_chunked)(
            values,
            functional.softplus(at_least_fp32(steps) + at_least_fp32(self.dt_bias)),
            -at_least_fp32(self.a_log).exp(),
            ins,
            outs,
            chunk=self.chunk,
        )
        y = y + self.skip.unsqueeze(-1) * values
        return self.out_projection(self._gated_norm(y.flatten(2), gate))

    def _gated_norm(self, y: Any, gate: Any) -> Any:
        """RMSNorm of y * silu(gate) over the width of all ranks, [B, T, I] -> [B, T, I]."""
        gated = at_least_fp32(y) * functional.silu(at_least_fp32(gate))
        squares = self.border.sum_inside(gated.square().sum(dim=-1, keepdim=True))
        normed = gated * torch.rsqrt(squares / self.whole_inner + self.eps)
        return (normed * at_least_fp32(self.norm_weight)).to(y.dtype)

    def whole_parameters(self) -> list[Any]:
        """Those of b and c: whole on every rank, with a part of their gradient on each."""
        return [self.in_directions, self.directions_conv_weight, self.directions_conv_bias]

    def join_parts(self, held: Mapping[str, Any]) -> dict[str, Any]:
        """What has the names of this module's parameters, under those of `Mamba2Mixer`, cut as `plan_cuts` says."""
        gate_and_values, steps = held["in_share"].split([2 * self.inner, self.heads])
        return {
            "in_projection.layer_norm_weight": held["norm.weight"],
            "in_projection.weight": torch.cat([gate_and_values, held["in_directions"], steps]),
            "conv_weight": torch.cat([held["conv_weight"], held["directions_conv_weight"]]),
            "conv_bias": torch.cat([held["conv_bias"], held["directions_conv_bias"]]),
            **{name: held[name] for name in ("a_log", "skip", "dt_bias", "norm_weight", "out_projection.weight")},
        }

    def cut_parts(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of `join_parts`; names that `Mamba2Mixer` does not have stay, so that who takes them refuses."""
        left = dict(state)
        cut: dict[str, Any] = {}
        if "in_projection.layer_norm_weight" in left:
            cut["norm.weight"] = left.pop("in_projection.layer_norm_weight")
        if "in_projection.weight" in left:
            weight = left.pop("in_projection.weight")
            first, last = 2 * self.inner, 2 * self.inner + 2 * self.state
            cut["in_share"], cut["in_directions"] = torch.cat([weight[:first], weight[last:]]), weight[first:last]
        for name in ("conv_weight", "conv_bias"):
            if name in left:
                whole = left.pop(name)
                cut[name], cut[f"directions_{name}"] = whole[: self.inner], whole[self.inner :]
        return {**cut, **left}


def _convolve(mixed: Any, weight: Any, bias: Any) -> Any:
    """Causal depthwise convolution and SiLU over [B, T, C], as `native.mamba.Mamba2Mixer` has it."""
    padded = functional.pad(mixed.transpose(1, 2), (weight.shape[1] - 1, 0))
    convolved = functional.conv1d(padded, weight.unsqueeze(1), bias, groups=mixed.shape[2])
    return functional.silu(convolved).transpose(1, 2)
