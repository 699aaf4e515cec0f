"""The layers of the spec in fp64, written out step by step; gradients come from autograd over these formulas.

Parameters are given by the names that the layers register them under.

Sources: quick GELU: arXiv:1606.08415; gates: arXiv:2002.05202, the first half of the width being the gate; squared
ReLU: arXiv:2109.08668; LayerNorm: arXiv:1607.06450; Mamba-2: arXiv:2405.21060; load-balancing loss: arXiv:2101.03961,
eq. 4; router z-loss: arXiv:2202.08906, eq. 5. The clamped SwiGLU is that of gpt-oss: a limit of 7, a slope of 1.702
and an offset of 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

Tensors = Mapping[str, Any]
"""Parameters by the names that layers register them under, and the rows as "input"."""


EXPANDED: Final = ("a_log", "dt_bias", "skip", "input_bias", "forget_bias")
"""One number a head: gradients that are sums over all rows, in which large terms may cancel."""


def _logistic(x: Any) -> Any:
    return 1.0 / (1.0 + torch.exp(-x))


PLAIN: Final[dict[str, Callable[[Any], Any]]] = {
    "gelu": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
    "qgelu": lambda x: x * _logistic(1.702 * x),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "srelu": lambda x: torch.where(x > 0, x, 0.0) ** 2,
    "silu": lambda x: x * _logistic(x),
}
GATES: Final[dict[str, Callable[[Any], Any]]] = {
    "geglu": PLAIN["gelu"],
    "glu": _logistic,
    "qgeglu": PLAIN["qgelu"],
    "reglu": PLAIN["relu"],
    "sreglu": PLAIN["srelu"],
    "swiglu": PLAIN["silu"],
}
CLAMPED: Final = "clamped_swiglu"


def acted(up: Any, name: str) -> Any:
    """[..., F] -> [..., F]; of a gated activation [..., 2F] -> [..., F]."""
    if name in PLAIN:
        return PLAIN[name](up)
    half = up.shape[-1] // 2
    gate, other = up[..., :half], up[..., half:]
    if name == CLAMPED:
        gate = torch.where(gate > 7.0, 7.0, gate)
        other = torch.where(other > 7.0, 7.0, torch.where(other < -7.0, -7.0, other))
        return gate * _logistic(1.702 * gate) * (other + 1.0)
    return GATES[name](gate) * other


def rms_norm(rows: Any, weight: Any, eps: float) -> Any:
    """[..., D] -> [..., D]."""
    return rows / torch.sqrt((rows * rows).mean(-1, keepdim=True) + eps) * weight


def layer_norm(given: Tensors, *, eps: float, prefix: str = "") -> Any:
    """[..., D] -> [..., D]: the variance is the mean square of what is left without the mean."""
    left = given["input"] - given["input"].mean(-1, keepdim=True)
    normed = left / torch.sqrt((left * left).mean(-1, keepdim=True) + eps)
    return normed * given[f"{prefix}weight"] + given[f"{prefix}bias"]


def layer_norm_linear(given: Tensors, *, eps: float) -> Any:
    """LayerNorm, then a linear layer with its bias: [..., K] -> [..., N]."""
    normed = layer_norm(given, eps=eps, prefix="layer_norm_")
    return torch.einsum("...k,nk->...n", normed, given["weight"]) + given["bias"]


def linear(given: Tensors) -> Any:
    """[..., K] -> [..., N], with a bias where there is one."""
    out = torch.einsum("...k,nk->...n", given["input"], given["weight"])
    return out if given.get("bias") is None else out + given["bias"]


def norm_linear(given: Tensors, eps: float, prefix: str = "") -> Any:
    """RMSNorm and a linear layer, whose parameters have names that begin with `prefix`: [..., K] -> [..., N]."""
    normed = rms_norm(given["input"], given[f"{prefix}layer_norm_weight"], eps)
    return torch.einsum("...k,nk->...n", normed, given[f"{prefix}weight"])


def mlp(given: Tensors, *, activation: str, eps: float, norm: str = "rms") -> Any:
    """Norm ("rms", or "layer" with shifts and biases), up, activation, down: [..., D] -> [..., D]."""
    if norm == "layer":
        normed = layer_norm(given, eps=eps, prefix="layer_norm_")
    else:
        normed = rms_norm(given["input"], given["layer_norm_weight"], eps)
    up = torch.einsum("...k,nk->...n", normed, given["fc1_weight"]) + given.get("fc1_bias", 0.0)
    return torch.einsum("...k,nk->...n", acted(up, activation), given["fc2_weight"]) + given.get("fc2_bias", 0.0)


def mamba_mixer(parameters: Tensors, *, state: int, head_dim: int, groups: int, eps: float) -> Any:
    """The Mamba-2 mixer by its recurrence, one row after another: [B, T, D] -> [B, T, D]."""
    rows = parameters["input"]
    batch, length, _ = rows.shape
    inner = parameters["norm_weight"].shape[0]
    heads, directions = inner // head_dim, groups * state
    projected = norm_linear(parameters, eps, "in_projection.")
    gate, mixed, steps = projected.split([inner, inner + 2 * directions, heads], dim=-1)
    mixed = PLAIN["silu"](_causal_convolution(mixed, parameters["conv_weight"], parameters["conv_bias"]))
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
    gated = torch.stack(seen, 1).reshape(batch, length, inner) * PLAIN["silu"](gate)
    share = gated.reshape(batch, length, groups, inner // groups)
    normed = (share / torch.sqrt((share * share).mean(-1, keepdim=True) + eps)).reshape(gated.shape)
    return torch.einsum("...k,nk->...n", normed * parameters["norm_weight"], parameters["out_projection.weight"])


def recurrent_block(parameters: Tensors, *, heads: int, key_dim: int, value_dim: int, eps: float) -> Any:
    """The matrix-state recurrent block by its recurrence, gates not stabilised: [B, T, D] -> [B, T, D]."""
    rows = parameters["input"]
    keys, values = heads * key_dim, heads * value_dim
    projected = norm_linear(parameters, eps, "in_projection.")
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


def _causal_convolution(mixed: Any, weight: Any, bias: Any) -> Any:
    """Each channel [B, T, C] with its own taps [C, L]; the last tap is of the row itself."""
    taps = weight.shape[1]
    out = bias.expand_as(mixed)
    for back in range(min(taps, mixed.shape[1])):
        shifted = torch.cat([torch.zeros_like(mixed[:, :back]), mixed[:, : mixed.shape[1] - back]], dim=1)
        out = out + shifted * weight[:, taps - 1 - back]
    return out


def scan(x: Any, dt: Any, a: Any, b: Any, c: Any, state: Any) -> tuple[Any, Any]:
    """h = exp(dt a) h + dt x b^T and y = h c, head by head and step by step from a given state.

    Args:
        x: [B, T, H, P].
        dt: [B, T, H].
        a: [H].
        b, c: [B, T, G, N]; head h uses group h // (H / G).
        state: [B, H, P, N].

    Returns:
        y [B, T, H, P] and the last state [B, H, P, N].
    """
    share, heads, last = x.shape[2] // b.shape[2], [], []
    for head in range(x.shape[2]):
        group, held, seen = head // share, state[:, head], []
        for now in range(x.shape[1]):
            step = dt[:, now, head, None, None]
            held = torch.exp(step * a[head]) * held
            held = held + step * x[:, now, head, :, None] * b[:, now, group, None, :]
            seen.append(torch.einsum("bpn,bn->bp", held, c[:, now, group]))
        heads.append(torch.stack(seen, dim=1))
        last.append(held)
    return torch.stack(heads, dim=2), torch.stack(last, dim=1)


def router(tokens: Any, weight: Any, top_k: int) -> tuple[Any, Any, Any]:
    """Probabilities of the chosen experts, [T, E], divided by their sum; both losses without their coefficients.

    Args:
        tokens: [T, D], no two logits of a token alike.
        weight: [E, D].
        top_k: experts a token.
    """
    count, experts = len(tokens), len(weight)
    logits = torch.einsum("td,ed->te", tokens, weight)
    raised = torch.exp(logits)
    total = raised.sum(1)
    probs = raised / total[:, None]
    chosen = torch.zeros_like(probs)
    for token in range(count):
        ranked = sorted(range(experts), key=lambda expert: -float(logits[token, expert].detach()))
        chosen[token, ranked[:top_k]] = 1.0
    kept = probs * chosen
    balance = sum(experts * (chosen[:, e].sum() / (count * top_k)) * probs[:, e].mean() for e in range(experts))
    return kept / kept.sum(1, keepdim=True), balance, (torch.log(total) ** 2).mean()
