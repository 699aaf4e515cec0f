"""What only plain PyTorch computes, in fp64 and written out: activations, norms with shifts, scans, router losses.

Sources: quick GELU: arXiv:1606.08415; gates: arXiv:2002.05202, the first half of the width being the gate; squared
ReLU: arXiv:2109.08668; LayerNorm: arXiv:1607.06450; Mamba-2: arXiv:2405.21060; load-balancing loss: arXiv:2101.03961,
eq. 4; router z-loss: arXiv:2202.08906, eq. 5. The clamped SwiGLU is that of gpt-oss: a limit of 7, a slope of 1.702
and an offset of 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch

from .layers import Parameters


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


def layer_norm(rows: Any, parameters: Parameters, *, eps: float, prefix: str = "") -> Any:
    """[..., D] -> [..., D]: the variance is the mean square of what is left without the mean."""
    left = rows - rows.mean(-1, keepdim=True)
    normed = left / torch.sqrt((left * left).mean(-1, keepdim=True) + eps)
    return normed * parameters[f"{prefix}weight"] + parameters[f"{prefix}bias"]


def norm_linear(rows: Any, parameters: Parameters, *, eps: float) -> Any:
    """LayerNorm, then a linear layer with its bias: [..., K] -> [..., N]."""
    normed = layer_norm(rows, parameters, eps=eps, prefix="layer_norm_")
    return torch.einsum("...k,nk->...n", normed, parameters["weight"]) + parameters["bias"]


def mlp(rows: Any, parameters: Parameters, *, activation: str, eps: float) -> Any:
    """LayerNorm, up, activation, down, each with its bias: [..., D] -> [..., D]."""
    normed = layer_norm(rows, parameters, eps=eps, prefix="layer_norm_")
    up = torch.einsum("...k,nk->...n", normed, parameters["fc1_weight"]) + parameters["fc1_bias"]
    return torch.einsum("...k,nk->...n", acted(up, activation), parameters["fc2_weight"]) + parameters["fc2_bias"]


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
