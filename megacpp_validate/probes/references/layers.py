"""The layers of the spec in fp64, written out step by step; gradients come from autograd over these formulas.

Parameters are given by the names that the layers register them under.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Parameters = Mapping[str, Any]
Function = Callable[[Any, Parameters], Any]


@dataclass(frozen=True)
class Step:
    """One forward and backward pass.

    Attributes:
        out: what came out.
        grads: gradient by name: of each parameter, and of the input as "input".
        scales: name -> norm of the terms that a gradient is the sum of, where they may cancel.
    """

    out: Any
    grads: Mapping[str, Any]
    scales: Mapping[str, float] = field(default_factory=dict)


def reference_step(function: Function, rows: Any, parameters: Parameters, gradient: Any) -> Step:
    """Output and every gradient in fp64, from operands as they were rounded.

    A parameter that `function` reads as `EXPANDED` is given anew for each row, so that its gradient's terms are seen.
    """
    x = rows.detach().double().requires_grad_(True)
    given = {name: value.detach().double().requires_grad_(True) for name, value in parameters.items()}
    spread = {name: given[name].detach().expand(*rows.shape[:-1], -1).clone().requires_grad_(True)
              for name in EXPANDED if name in given}  # fmt: skip
    out = function(x, given | spread)
    out.backward(gradient.detach().double())
    grads = {name: value.grad for name, value in given.items()}
    axes = tuple(range(rows.dim() - 1))
    grads |= {name: value.grad.sum(axes) for name, value in spread.items()}
    scales = {name: float(value.grad.norm()) for name, value in spread.items()}
    return Step(out.detach(), {"input": x.grad, **grads}, scales)


EXPANDED = "a_log", "dt_bias", "skip", "input_bias", "forget_bias"
"""One number a head: gradients that are sums over all rows, in which large terms may cancel."""


def rms_norm(rows: Any, weight: Any, eps: float) -> Any:
    """[..., D] -> [..., D]."""
    return rows / torch.sqrt((rows * rows).mean(-1, keepdim=True) + eps) * weight


def norm_linear(rows: Any, parameters: Parameters, eps: float) -> Any:
    """[..., K] -> [..., N]."""
    normed = rms_norm(rows, parameters["layer_norm_weight"], eps)
    return torch.einsum("...k,nk->...n", normed, parameters["weight"])


def mlp(rows: Any, parameters: Parameters, *, gated: bool, eps: float) -> Any:
    """Norm, then SwiGLU (gated; the first half is the gate) or GELU by tanh: [..., D] -> [..., D]."""
    normed = rms_norm(rows, parameters["layer_norm_weight"], eps)
    up = torch.einsum("...k,nk->...n", normed, parameters["fc1_weight"])
    if gated:
        width = up.shape[-1] // 2
        acted = _silu(up[..., :width]) * up[..., width:]
    else:
        acted = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    return torch.einsum("...k,nk->...n", acted, parameters["fc2_weight"])


def mamba_mixer(rows: Any, parameters: Parameters, *, state: int, head_dim: int, groups: int, eps: float) -> Any:
    """The Mamba-2 mixer by its recurrence, one row after another: [B, T, D] -> [B, T, D]."""
    batch, length, _ = rows.shape
    inner = parameters["norm_weight"].shape[0]
    heads, directions = inner // head_dim, groups * state
    projected = norm_linear(rows, {name: parameters[f"in_projection.{name}"] for name in _IN}, eps)
    gate, mixed, steps = projected.split([inner, inner + 2 * directions, heads], dim=-1)
    mixed = _silu(_causal_convolution(mixed, parameters["conv_weight"], parameters["conv_bias"]))
    values, ins, outs = mixed.split([inner, directions, directions], dim=-1)
    values = values.reshape(batch, length, heads, head_dim)
    ins, outs = (
        part.reshape(batch, length, groups, state).repeat_interleave(heads // groups, 2) for part in (ins, outs)
    )
    dt = torch.log1p(torch.exp(steps + parameters["dt_bias"]))
    decay = torch.exp(-dt * torch.exp(parameters["a_log"]))  # [B, T, H]
    skip = parameters["skip"].expand(batch, length, heads)
    memory = rows.new_zeros(batch, heads, head_dim, state)
    seen = []
    for now in range(length):
        added = torch.einsum("bh,bhp,bhn->bhpn", dt[:, now], values[:, now], ins[:, now])
        memory = decay[:, now, :, None, None] * memory + added
        read = torch.einsum("bhpn,bhn->bhp", memory, outs[:, now])
        seen.append(read + skip[:, now, :, None] * values[:, now])
    gated = torch.stack(seen, 1).reshape(batch, length, inner) * _silu(gate)
    share = gated.reshape(batch, length, groups, inner // groups)
    normed = (share / torch.sqrt((share * share).mean(-1, keepdim=True) + eps)).reshape(gated.shape)
    return torch.einsum("...k,nk->...n", normed * parameters["norm_weight"], parameters["out_projection.weight"])


def recurrent_block(rows: Any, parameters: Parameters, *, heads: int, key_dim: int, value_dim: int, eps: float) -> Any:
    """The matrix-state recurrent block by its recurrence, gates not stabilised: [B, T, D] -> [B, T, D]."""
    keys, values = heads * key_dim, heads * value_dim
    projected = norm_linear(rows, {name: parameters[f"in_projection.{name}"] for name in _IN}, eps)
    query, key, value, gate, input_gate, forget = projected.split([keys, keys, values, values, heads, heads], dim=-1)
    shape = (*rows.shape[:2], heads, -1)
    query, key, value = query.reshape(shape) / math.sqrt(key_dim), key.reshape(shape), value.reshape(shape)
    entering = torch.exp(input_gate + parameters["input_bias"])
    kept = 1 / (1 + torch.exp(-forget - parameters["forget_bias"]))
    memory = rows.new_zeros(rows.shape[0], heads, key_dim, value_dim)
    key_sum = rows.new_zeros(rows.shape[0], heads, key_dim)
    seen = []
    for now in range(rows.shape[1]):
        new = entering[:, now, :, None] * key[:, now]
        memory = kept[:, now, :, None, None] * memory + torch.einsum("bhk,bhv->bhkv", new, value[:, now])
        key_sum = kept[:, now, :, None] * key_sum + new
        divisor = torch.einsum("bhk,bhk->bh", query[:, now], key_sum).abs().clamp_min(1)
        seen.append(torch.einsum("bhk,bhkv->bhv", query[:, now], memory) / divisor[..., None])
    y = torch.stack(seen, 1)
    normed = (y / torch.sqrt((y * y).mean(-1, keepdim=True) + eps)).reshape(*rows.shape[:2], values)
    gated = normed * parameters["norm_weight"] * torch.sigmoid(gate)
    return rows + torch.einsum("...k,nk->...n", gated, parameters["out_projection.weight"])


def expert_bank(rows: Any, weights: Sequence[Any], counts: Sequence[int]) -> Any:
    """One linear layer an expert, in fp64: [R, K] -> [R, N]."""
    parts = rows.detach().double().split(list(counts))
    return torch.cat([part @ weight.detach().double().t() for part, weight in zip(parts, weights, strict=True)])


_IN = "layer_norm_weight", "weight"


def _silu(x: Any) -> Any:
    return x / (1 + torch.exp(-x))


def _causal_convolution(mixed: Any, weight: Any, bias: Any) -> Any:
    """Each channel [B, T, C] with its own taps [C, L]; the last tap is of the row itself."""
    taps = weight.shape[1]
    out = bias.expand_as(mixed)
    for back in range(min(taps, mixed.shape[1])):
        shifted = torch.cat([torch.zeros_like(mixed[:, :back]), mixed[:, : mixed.shape[1] - back]], dim=1)
        out = out + shifted * weight[:, taps - 1 - back]
    return out
