"""The Mamba-2 mixer with its heads split over a tensor group, and the way out of every split layer.

Gate, values and steps belong to heads, and a rank has those of its own. The directions b and c are one group's: every
head reads them, so every rank computes them whole, for its heads alone; what a rank learns of their weights is a part.
They are parameters of their own, so that each parameter is either a share or whole. The gated norm is over the width of
all heads: its sum of squares is taken over the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ...native.mamba import at_least_fp32, ssd_chunked
from ...native.norms import RMSNorm
from .tensor_collectives import TensorBorder
from .tensor_weights import MAMBA_EXPAND

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
