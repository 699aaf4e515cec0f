"""Attention in fp64, one head after the other, and which key each query sees, one condition after the other.

Source: Vaswani et al. 2017, arXiv:1706.03762; grouped queries: arXiv:2305.13245; soft cap: arXiv:2408.00118; block
routing: arXiv:2502.13189.

The rotary embedding in fp64, one pair of channels and one position at a time.

Source: Su et al. 2021, arXiv:2104.09864, with rotate-half pairs: channel j and channel j + D/2, as in GPT-NeoX.

The A-block in fp64: norm, QKV, rotary embedding, attention, output; norm, MLP; each on a residual stream.

Sources: RMSNorm: arXiv:1910.07467; rotary embedding, rotate-half pairs: arXiv:2104.09864; gated MLP: arXiv:2002.05202,
with Transformer Engine's order, in which the first half of the up-projection is the gate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .layers import acted, rms_norm


def visible(
    batch: int,
    heads: int,
    length: int,
    *,
    causal: bool = True,
    doc_ids: Any = None,
    window: int | None = None,
    block_mask: Any = None,
    block_size: int = 1,
    device: Any = None,
) -> Any:
    """Which key each query sees, [B, H, T, T] bool.

    Args:
        batch, heads, length: B, H and T.
        causal: key j <= query i.
        doc_ids: [B, T]; of one document.
        window: j > i - window.
        block_mask: [B or 1, H or 1, blocks, blocks]; the block of j is routed to the block of i.
        block_size: tokens in a block.
        device: of the mask.
    """
    place = torch.arange(length, device=device)
    query, key = place[:, None], place[None, :]
    seen = torch.ones(batch, heads, length, length, dtype=torch.bool, device=device)
    if causal:
        seen &= key <= query
    if window is not None:
        seen &= key > query - window
    if doc_ids is not None:
        seen &= (doc_ids[:, :, None] == doc_ids[:, None, :])[:, None]
    if block_mask is not None:
        seen &= block_mask[:, :, query // block_size, key // block_size]
    return seen


def attend(
    query: Any, key: Any, value: Any, seen: Any, *, scale: float | None = None, softcap: float | None = None
) -> Any:
    """Attention, head by head; differentiable.

    Args:
        query: [B, H, T, D], fp64.
        key, value: [B, G, T, D]; query head h uses group h // (H / G).
        seen: [B, H, T, T] bool.
        scale: factor on the scores; None is 1 / sqrt(D).
        softcap: scores s become softcap * tanh(s / softcap).

    Returns:
        [B, H, T, D]; a row that sees nothing is zero.
    """
    heads, share = query.shape[1], query.shape[1] // key.shape[1]
    factor = 1.0 / math.sqrt(query.shape[3]) if scale is None else scale
    out = []
    for head in range(heads):
        group = head // share
        scores = factor * torch.einsum("btd,bsd->bts", query[:, head], key[:, group])
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        sees = seen[:, head]
        top = scores.detach().masked_fill(~sees, -math.inf).amax(-1, keepdim=True).clamp_min(-1e300)
        raised = torch.where(sees, (scores - top).clamp_max(0.0).exp(), 0.0)
        total = raised.sum(-1, keepdim=True)
        weights = raised / torch.where(total > 0, total, 1.0)
        out.append(torch.einsum("bts,bsd->btd", weights, value[:, group]))
    return torch.stack(out, dim=1)


def angle(position: int, pair: int, width: int, base: float) -> float:
    """By how much the pair (j, j + D/2) of a head of this width is turned at a position, in radians."""
    return position / math.pow(base, 2.0 * pair / width)


def rotary_tables(length: int, width: int, base: float) -> tuple[Any, Any]:
    """Cosine and sine of every angle, each [T, D/2], fp64."""
    angles = [[angle(position, pair, width, base) for pair in range(width // 2)] for position in range(length)]
    made = [
        torch.tensor([[function(one) for one in row] for row in angles], dtype=torch.float64)
        for function in (math.cos, math.sin)
    ]
    return made[0], made[1]


def rotated(rows: Any, base: float, offset: int = 0) -> Any:
    """[B, H, T, D] in fp64, whose first row is at the position `offset`, turned; the same shape."""
    length, width = rows.shape[2:]
    out, half = torch.empty_like(rows), rows.shape[3] // 2
    for place in range(length):
        for pair in range(half):
            turn = angle(place + offset, pair, width, base)
            first, second = rows[:, :, place, pair], rows[:, :, place, pair + half]
            out[:, :, place, pair] = first * math.cos(turn) - second * math.sin(turn)
            out[:, :, place, pair + half] = second * math.cos(turn) + first * math.sin(turn)
    return out


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
