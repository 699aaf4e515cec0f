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
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ...bridge.backends import Choice, Refusal, choose
from ...bridge.compiled_scan import compiled_scan
from ...bridge.features import why_not_te
from ...bridge.native_block import NativeBlock
from ...bridge.walk_plan import TE_DTYPES
from ...native.block import ABlock
from ...native.mlp import MLP, NormMLP
from ...native.norms import NormLinear
from ...native.recurrent import MatrixRecurrentBlock
from ..errors import WrongSize
from ..first_weights import first_weights
from ..layers import Build, Stepped, copy_weights, take_weights
from ..pattern import Letter
from ..sizes import Size
from .replicas import mark_split
from .tensor_collectives import TensorBorder
from .tensor_mamba import SplitMambaMixer, SplitOut
from .tensor_weights import cut_state, mark_shares, plan_cuts


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
