"""The A-block in fp64: norm, QKV, rotary embedding, attention, output; norm, MLP; each on a residual stream.

Sources: RMSNorm: arXiv:1910.07467; rotary embedding, rotate-half pairs: arXiv:2104.09864; gated MLP: arXiv:2002.05202,
with Transformer Engine's order, in which the first half of the up-projection is the gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .attention import attend
from .layers import acted, rms_norm


@dataclass(frozen=True)
class Sizes:
    """What the weights alone do not say.

    Attributes:
        heads, groups, width: H, G and D of the attention.
        activation: of the MLP.
        eps: of both norms.
    """

    heads: int
    groups: int
    width: int
    activation: str
    eps: float


@dataclass(frozen=True)
class Shares:
    """How large the parts of a block are beside their sums, in squared norms; errors of a part count that much.

    Attributes:
        attention: of the attention branch in the stream after it.
        stream, mlp: of that stream and of the MLP branch in the output.
        mlp_back: of the gradient through the MLP in the gradient of the stream between.
        stream_back, attention_back: of that, and of the gradient through the attention, in the gradient of the input.
    """

    attention: float
    stream: float
    mlp: float
    mlp_back: float
    stream_back: float
    attention_back: float


@dataclass(frozen=True)
class BlockStep:
    """What one forward and backward pass gives.

    Attributes:
        out: [B, T, hidden].
        gradients: "rows" and every weight by native name.
        shares: of its parts.
    """

    out: Any
    gradients: dict[str, Any]
    shares: Shares


def block_step(
    rows: Any, weights: Mapping[str, Any], gradient: Any, sizes: Sizes, seen: Any, rope: tuple[Any, Any] | None
) -> BlockStep:
    """The whole block and every gradient, in fp64.

    Args:
        rows: [B, T, hidden].
        weights: by native names.
        gradient: of the output, [B, T, hidden].
        sizes: heads, groups, head size, activation, eps.
        seen: [B, H, T, T] bool, which key each query sees.
        rope: (cos, sin), each [at least T, D/2].
    """
    x = rows.detach().double().requires_grad_()
    leaves = {name: weight.detach().double().requires_grad_() for name, weight in weights.items()}
    turned = None if rope is None else (rope[0].double(), rope[1].double())
    attention = attention_branch(x, leaves, sizes, seen, turned)
    stream = x + attention
    mlp = mlp_branch(stream, leaves, sizes)
    upstream = gradient.double()
    (through_mlp,) = torch.autograd.grad(mlp, stream, upstream, retain_graph=True)
    back = upstream + through_mlp
    out = stream + mlp
    made = torch.autograd.grad(out, (x, *leaves.values()), upstream)
    shares = Shares(
        attention=_share(attention, stream),
        stream=_share(stream, out),
        mlp=_share(mlp, out),
        mlp_back=_share(through_mlp, back),
        stream_back=_share(back, made[0]),
        attention_back=_share(made[0] - back, made[0]),
    )
    return BlockStep(out.detach(), dict(zip(("rows", *leaves), made, strict=True)), shares)


def _share(part: Any, whole: Any) -> float:
    return float((part.detach().norm() / whole.detach().norm()) ** 2)


def attention_branch(
    rows: Any, weights: Mapping[str, Any], sizes: Sizes, seen: Any, rope: tuple[Any, Any] | None
) -> Any:
    """out(attention(rope(qkv(norm(rows))))), [B, T, hidden] -> [B, T, hidden]."""
    normed = rms_norm(rows, weights["qkv.layer_norm_weight"], sizes.eps)
    mixed = torch.einsum("btc,nc->btn", normed, weights["qkv.weight"])
    heads: list[Any] = [
        mixed[..., start : start + sizes.width]
        for start in range(0, (sizes.heads + 2 * sizes.groups) * sizes.width, sizes.width)
    ]
    query = torch.stack(heads[: sizes.heads], dim=1)
    key = torch.stack(heads[sizes.heads : sizes.heads + sizes.groups], dim=1)
    value = torch.stack(heads[sizes.heads + sizes.groups :], dim=1)
    if rope is not None:
        query, key = _turn(query, *rope), _turn(key, *rope)
    out = attend(query, key, value, seen)
    joined = torch.cat([out[:, head] for head in range(sizes.heads)], dim=-1)
    return torch.einsum("btc,nc->btn", joined, weights["out.weight"])


def mlp_branch(rows: Any, weights: Mapping[str, Any], sizes: Sizes) -> Any:
    """fc2(activation(fc1(norm(rows)))), [B, T, hidden] -> [B, T, hidden]."""
    normed = rms_norm(rows, weights["mlp.layer_norm_weight"], sizes.eps)
    up = torch.einsum("btc,nc->btn", normed, weights["mlp.fc1_weight"])
    return torch.einsum("btc,nc->btn", acted(up, sizes.activation), weights["mlp.fc2_weight"])


def _turn(heads: Any, cos: Any, sin: Any) -> Any:
    """Each pair (j, j + D/2) of [B, H, T, D] turned by the angle of its position, as one complex number."""
    length, half = heads.shape[2], heads.shape[3] // 2
    turned = torch.complex(heads[..., :half], heads[..., half:]) * torch.complex(cos[:length], sin[:length])
    return torch.cat((turned.real, turned.imag), dim=-1)
