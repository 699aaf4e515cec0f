"""Mamba-2: the state-space mixer, its chunked scan and the exact recurrence.

Source: Dao & Gu 2024, "Transformers are SSMs", arXiv:2405.21060: the recurrence with one decay a head and step, the
chunked form of its section 6 and listing 1, the mixer of its section 7. Scans compute in fp32 at least, also inside an
autocast region.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.nn import functional

from .norms import INIT_STD, NormLinear, without_autocast

# The ranges from which Mamba-2 draws the initial step and decay.
DT_RANGE = (1e-3, 1e-1)
DECAY_RANGE = (1.0, 16.0)
ROPE_FRACTION: Final = 0.5  # of the state, in pairs, that Mamba-3 turns by default

Layout = Literal["mamba2", "mamba3"]


def in_projection_rows(
    layout: Layout, *, inner: int, head_dim: int, state: int, groups: int = 1, mimo_rank: int = 1
) -> dict[str, int]:
    """Rows of the one fused in-projection of a mixer, by name and in their order.

    Mamba-2 has [z, x, B, C, dt] (`mamba_ssm/modules/mamba2.py`; megatron-core's `ssm/mamba_mixer.py` calls the whole
    zxBCdt). Mamba-3 has [z, x, B, C, dd_dt, dd_A, trap, angle] (`mamba_ssm/modules/mamba3.py` at 0348a3dd): decays and
    the trapezoidal gate come from the row too, directions are turned by angles, and there is no convolution.

    Args:
        layout: of which mixer.
        inner: I, width of z and x.
        head_dim: P; heads H = I / P.
        state: N, size of the state a channel.
        groups: G, how many B and C there are; divides H.
        mimo_rank: R of Mamba-3, directions a group; 1 without MIMO.

    Raises:
        ValueError: sizes that do not divide.
    """
    if head_dim < 1 or groups < 1 or inner % head_dim or inner // head_dim % groups:
        raise ValueError(
            f"an inner width of {inner} has no heads of {head_dim} that {groups} group(s) share evenly. Next step: "
            "choose a head size that divides it, and groups that divide the heads."
        )
    heads, directions = inner // head_dim, groups * state * mimo_rank
    rows = {"z": inner, "x": inner, "B": directions, "C": directions}
    if layout == "mamba2":
        return {**rows, "dt": heads}
    return {**rows, "dd_dt": heads, "dd_A": heads, "trap": heads, "angle": int(state * ROPE_FRACTION) // 2}


def ssd_chunked(x: Any, dt: Any, a: Any, b: Any, c: Any, *, chunk: int) -> tuple[Any, Any]:
    """h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t^T and y_t = h_t c_t, from h = 0.

    By chunks: matrix products inside a chunk, a recurrence from one to the next.

    Args:
        x: [B, T, H, P] inputs.
        dt: [B, T, H] steps, >= 0.
        a: [H] rates, <= 0: the state of head h decays by exp(dt * a[h]).
        b: [B, T, G, N] input directions; G divides H, and group g serves heads g*H/G to (g+1)*H/G - 1.
        c: [B, T, G, N] output directions.
        chunk: steps a chunk; T need not be a multiple. The scan keeps B * H * T * chunk numbers.

    Returns:
        y [B, T, H, P] in the dtype of `x`; the final state [B, H, P, N] in fp32 at least.
    """
    with without_autocast(x):
        return _scan_chunks(x, dt, a, b, c, min(chunk, x.shape[1]))


def _scan_chunks(x: Any, dt: Any, a: Any, b: Any, c: Any, chunk: int) -> tuple[Any, Any]:
    wide = widest(x, dt, a, b, c)
    groups = b.shape[2]
    # Heads [H] become [G, R]: R heads share the b and c of their group, without a copy. A padded step has dt 0: it
    # neither decays the state nor adds to it.
    values = split_chunks(x.to(wide), chunk).unflatten(3, (groups, -1))  # [B, S, L, G, R, P]
    steps = split_chunks(dt.to(wide), chunk).unflatten(3, (groups, -1))  # [B, S, L, G, R]
    ins, outs = split_chunks(b.to(wide), chunk), split_chunks(c.to(wide), chunk)  # [B, S, L, G, N]
    rates = (steps * a.to(wide).unflatten(0, (groups, -1))).movedim(2, -1)  # [B, S, G, R, L]
    values = values * steps.unsqueeze(-1)

    decay = segment_sums(rates).exp()  # [B, S, G, R, L, L]
    within = torch.einsum("bslgn,bsmgn->bsglm", outs, ins).unsqueeze(3) * decay
    y = torch.einsum("bsgrlm,bsmgrp->bslgrp", within, values)

    leaving = decay[..., -1, :].movedim(-1, 2).unsqueeze(-1) * values  # what of each step is left at the chunk's end
    added = torch.einsum("bsmgrp,bsmgn->bsgrpn", leaving, ins)
    since_start = rates.cumsum(dim=-1)
    kept = since_start[..., -1].exp()  # [B, S, G, R]
    state = torch.zeros_like(added[:, 0])
    entering = []
    for index in range(added.shape[1]):
        entering.append(state)
        state = kept[:, index, ..., None, None] * state + added[:, index]
    carried = torch.einsum("bslgn,bsgrpn->bslgrp", outs, torch.stack(entering, dim=1))
    y = y + since_start.exp().movedim(-1, 2).unsqueeze(-1) * carried
    return y.flatten(3, 4).flatten(1, 2)[:, : x.shape[1]].to(x.dtype), state.flatten(1, 2)


def segment_sums(x: Any) -> Any:
    """[..., L] -> [..., L, L]: entry (i, j) is x[j+1] + ... + x[i], 0 on the diagonal and -inf above it.

    Each entry is summed on its own, as in listing 1 of the paper: a difference of two running sums would lose the
    small sums behind a strong decay.
    """
    length = x.shape[-1]
    ones = torch.ones(length, length, dtype=torch.bool, device=x.device)
    terms = x.unsqueeze(-1).expand(*x.shape, length).masked_fill(~ones.tril(-1), 0)
    return terms.cumsum(dim=-2).masked_fill(~ones.tril(0), float("-inf"))


def split_chunks(x: Any, chunk: int) -> Any:
    """[B, T, ...] -> [B, S, chunk, ...], the last chunk filled up with zeros."""
    missing = -x.shape[1] % chunk
    padded = functional.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    return padded.unflatten(1, (-1, chunk))


def widest(*tensors: Any) -> Any:
    """The dtype to compute in: what all promote to, fp32 at least."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


class Mamba2Mixer(nn.Module):
    """The Mamba-2 mixer behind its pre-norm; the residual connection is the caller's.

    `in_projection` norms and projects in one module, so that Transformer Engine's LayerNormLinear may stand in for it.
    Its rows are those of `in_projection_rows("mamba2")`: the gate z [I], the values x [I], the directions b and c
    [groups * state each] and the steps dt [H], where I = expand * hidden and H = I / head_dim.

    Args:
        hidden: width of the rows.
        state: N, size of the state a channel.
        head_dim: P.
        expand: inner width over `hidden`.
        groups: G, how many b and c there are; divides H.
        conv: taps of the causal convolution over x, b and c.
        chunk: of the scan.
        eps: of both norms.
        dtype, device: of the parameters.

    Attributes:
        in_projection: `NormLinear` with weight [2 * I + 2 * groups * state + H, hidden].
        conv_weight, conv_bias: [I + 2 * groups * state, conv] and [I + 2 * groups * state], a filter a channel.
        a_log: [H], a = -exp(a_log).
        skip: [H], D of the paper: y gains skip * x.
        dt_bias: [H], dt = softplus(projected + dt_bias).
        norm_weight: [I] of the gated RMSNorm, one norm a group.
        out_projection: nn.Linear(I, hidden).
        scan: what is called in the place of `ssd_chunked`, alike and with the same result; None is `ssd_chunked`.
    """

    def __init__(
        self,
        hidden: int,
        *,
        state: int,
        head_dim: int,
        expand: int = 2,
        groups: int = 1,
        conv: int = 4,
        chunk: int = 64,
        eps: float = 1e-5,
        dtype: Any = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        inner = expand * hidden
        rows = in_projection_rows("mamba2", inner=inner, head_dim=head_dim, state=state, groups=groups)
        heads = rows["dt"]
        self.hidden, self.inner, self.heads, self.head_dim = hidden, inner, heads, head_dim
        self.state, self.groups, self.chunk, self.eps = state, groups, chunk, eps
        self.scan: Any = None
        made = {"dtype": dtype, "device": device}
        mixed = inner + 2 * groups * state
        self.in_projection = NormLinear(hidden, sum(rows.values()), eps=eps, **made)
        self.conv_weight = nn.Parameter(torch.empty(mixed, conv, **made))
        self.conv_bias = nn.Parameter(torch.zeros(mixed, **made))
        self.a_log = nn.Parameter(torch.empty(heads, **made))
        self.skip = nn.Parameter(torch.ones(heads, **made))
        self.dt_bias = nn.Parameter(torch.empty(heads, **made))
        self.norm_weight = nn.Parameter(torch.ones(inner, **made))
        self.out_projection = nn.Linear(inner, hidden, bias=False, **made)
        for projection in (self.in_projection, self.out_projection):
            nn.init.normal_(projection.weight, std=INIT_STD)
        bound = 1 / math.sqrt(conv)
        nn.init.uniform_(self.conv_weight, -bound, bound)
        with torch.no_grad():  # as Mamba-2 starts: decays uniform, steps log-uniform
            self.a_log.uniform_(*DECAY_RANGE).log_()
            self.dt_bias.uniform_(*(math.log(end) for end in DT_RANGE)).exp_()
            # The inverse of softplus, so that softplus(dt_bias) is the step that was drawn.
            self.dt_bias.copy_(self.dt_bias + torch.log(-torch.expm1(-self.dt_bias)))

    def forward(self, rows: Any) -> Any:
        """[B, T, hidden] -> [B, T, hidden]; each row sees itself and those before it."""
        directions = self.groups * self.state
        gate, mixed, steps = self.project(rows)
        values, ins, outs = mixed.split([self.inner, directions, directions], dim=-1)
        values = values.unflatten(-1, (self.heads, self.head_dim))
        y, _ = (self.scan or ssd_chunked)(
            values,
            functional.softplus(at_least_fp32(steps) + at_least_fp32(self.dt_bias)),
            -at_least_fp32(self.a_log).exp(),
            ins.unflatten(-1, (self.groups, self.state)),
            outs.unflatten(-1, (self.groups, self.state)),
            chunk=self.chunk,
        )
        y = y + self.skip.unsqueeze(-1) * values
        return self.out_projection(self._gated_norm(y.flatten(2), gate))

    def project(self, rows: Any) -> tuple[Any, Any, Any]:
        """[B, T, hidden] -> gate [B, T, I], values with both directions after the convolution, and steps [B, T, H]."""
        widths = [self.inner, self.inner + 2 * self.groups * self.state, self.heads]
        gate, mixed, steps = self.in_projection(rows).split(widths, dim=-1)
        return gate, convolve(mixed, self.conv_weight, self.conv_bias), steps

    def mean_square(self, gated: Any) -> Any:
        """[..., I / groups] -> [..., 1]: what the gated norm divides by, squared."""
        return gated.square().mean(dim=-1, keepdim=True)

    def _gated_norm(self, y: Any, gate: Any) -> Any:
        """RMSNorm of y * silu(gate), group by group, as Mamba-2's RMSNormGated with norm_before_gate=False."""
        gated = (at_least_fp32(y) * functional.silu(at_least_fp32(gate))).unflatten(-1, (self.groups, -1))
        normed = gated * torch.rsqrt(self.mean_square(gated) + self.eps)
        return (normed.flatten(-2) * at_least_fp32(self.norm_weight)).to(y.dtype)


def convolve(mixed: Any, weight: Any, bias: Any) -> Any:
    """Causal depthwise convolution and SiLU over [B, T, C], with weight [C, taps] and bias [C]."""
    padded = functional.pad(mixed.transpose(1, 2), (weight.shape[1] - 1, 0))
    convolved = functional.conv1d(padded, weight.unsqueeze(1), bias, groups=mixed.shape[2])
    return functional.silu(convolved).transpose(1, 2)


def at_least_fp32(x: Any) -> Any:
    """In its own dtype or fp32, whichever is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
