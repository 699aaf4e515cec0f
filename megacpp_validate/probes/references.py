"""The layers of the spec, the A-block and the bank of experts in fp64, written out; gradients come from autograd.

Parameters are given by the names that the layers register them under.

Sources: gates: arXiv:2002.05202, the first half of the width being the gate; squared ReLU: arXiv:2109.08668; RMSNorm:
arXiv:1910.07467; Mamba-2: arXiv:2405.21060; attention: arXiv:1706.03762; grouped queries: arXiv:2305.13245; soft cap:
arXiv:2408.00118; block routing: arXiv:2502.13189; rotary embedding, rotate-half pairs: arXiv:2104.09864.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    "srelu": lambda x: torch.where(x > 0, x, 0.0) ** 2,
    "silu": lambda x: x * _logistic(x),
}
GATES: Final = {"geglu": PLAIN["gelu"], "swiglu": PLAIN["silu"]}


def acted(up: Any, name: str) -> Any:
    """[..., F] -> [..., F]; of a gated activation [..., 2F] -> [..., F]."""
    if name in PLAIN:
        return PLAIN[name](up)
    gate, other = up.chunk(2, dim=-1)
    return GATES[name](gate) * other


def rms_norm(rows: Any, weight: Any, eps: float) -> Any:
    """[..., D] -> [..., D]."""
    return rows / torch.sqrt((rows * rows).mean(-1, keepdim=True) + eps) * weight


def linear(given: Tensors) -> Any:
    """[..., K] -> [..., N], with a bias where there is one."""
    out = torch.einsum("...k,nk->...n", given["input"], given["weight"])
    return out if given.get("bias") is None else out + given["bias"]


def norm_linear(given: Tensors, eps: float, prefix: str = "", weight: str = "weight") -> Any:
    """RMSNorm and a linear layer, whose parameters have names that begin with `prefix`: [..., K] -> [..., N]."""
    normed = rms_norm(given["input"], given[f"{prefix}layer_norm_weight"], eps)
    return torch.einsum("...k,nk->...n", normed, given[f"{prefix}{weight}"])


def mlp(given: Tensors, *, activation: str, eps: float, prefix: str = "") -> Any:
    """RMSNorm, up, activation, down, whose parameters have names that begin with `prefix`: [..., D] -> [..., D]."""
    up = norm_linear(given, eps, prefix, "fc1_weight")
    return torch.einsum("...k,nk->...n", acted(up, activation), given[f"{prefix}fc2_weight"])


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
    read = _recurrence(decay, dt[..., None] * values, ins, outs) + skip[..., None] * values
    gated = read.reshape(batch, length, inner) * PLAIN["silu"](gate)
    normed = rms_norm(gated.reshape(batch, length, groups, inner // groups), 1.0, eps).reshape(gated.shape)
    return torch.einsum("...k,nk->...n", normed * parameters["norm_weight"], parameters["out_projection.weight"])


def _recurrence(decay: Any, values: Any, keys: Any, queries: Any) -> Any:
    """S <- decay S + value key^T, read as S query, one row after another.

    [B, T, H], [B, T, H, P], and [B, T, H, N] twice -> [B, T, H, P].
    """
    memory, read = 0.0, []
    for now in range(decay.shape[1]):
        added = torch.einsum("bhp,bhn->bhpn", values[:, now], keys[:, now])
        memory = decay[:, now, :, None, None] * memory + added
        read.append(torch.einsum("bhpn,bhn->bhp", memory, queries[:, now]))
    return torch.stack(read, 1)


def recurrent_block(parameters: Tensors, *, heads: int, key_dim: int, value_dim: int, eps: float) -> Any:
    """The matrix-state recurrent block by its recurrence, gates not stabilised: [B, T, D] -> [B, T, D]."""
    rows = parameters["input"]
    keys, values = heads * key_dim, heads * value_dim
    projected = norm_linear(parameters, eps, "in_projection.")
    query, key, value, gate, input_gate, forget = projected.split([keys, keys, values, values, heads, heads], dim=-1)
    shape = (*rows.shape[:2], heads, -1)
    query, key, value = query.reshape(shape) / math.sqrt(key_dim), key.reshape(shape), value.reshape(shape)
    key = torch.exp(input_gate + parameters["input_bias"])[..., None] * key
    kept = _logistic(forget + parameters["forget_bias"])
    divisor = _recurrence(kept, torch.ones_like(value[..., :1]), key, query).abs().clamp_min(1)
    normed = rms_norm(_recurrence(kept, value, key, query) / divisor, 1.0, eps).flatten(2)
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


# --- attention and the A-block --------------------------------------------------------------------------------------


def visible(
    batch: int, heads: int, length: int, *, causal: bool = True, doc_ids: Any = None, window: int | None = None,
    block_mask: Any = None, block_size: int = 1, indices: Any = None, device: Any = None,
) -> Any:  # fmt: skip
    """Which key each query sees, [B, H, T, T] bool.

    Args:
        batch, heads, length: B, H and T.
        causal: key j <= query i.
        doc_ids: [B, T]; of one document.
        window: j > i - window.
        block_mask: [B or 1, H or 1, T or blocks, blocks]; the block of j is routed to i, or to the block of i.
        block_size: tokens in a block.
        indices: [B, T, K]; j is one of the tokens of i.
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
        block = query if block_mask.shape[2] == length else query // block_size
        seen &= block_mask[:, :, block, key // block_size]
    if indices is not None:
        seen &= (indices[:, :, None, :] == place[:, None]).any(-1)[:, None]
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


def block_step(
    rows: Any, weights: Mapping[str, Any], gradient: Any, seen: Any, rope: tuple[Any, Any] | None, *,
    activation: str, eps: float, **heads: int,
) -> tuple[dict[str, Any], Shares]:  # fmt: skip
    """A pass of the whole block in fp64, with "grad.rows" and the gradient of every weight by native name.

    Args:
        rows: [B, T, hidden].
        weights: by native names.
        gradient: of the output, [B, T, hidden].
        seen: [B, H, T, T] bool, which key each query sees.
        rope: (cos, sin), each [at least T, D/2].
        activation: of the MLP.
        eps: of both norms.
        heads: H as `heads`, G as `groups` and D as `width`.
    """
    x = rows.detach().double().requires_grad_()
    leaves = {name: weight.detach().double().requires_grad_() for name, weight in weights.items()}
    turned = None if rope is None else (rope[0].double(), rope[1].double())
    attention = attention_branch(x, leaves, seen, turned, eps=eps, **heads)
    stream = x + attention
    passed = mlp({**leaves, "input": stream}, activation=activation, eps=eps, prefix="mlp.")
    upstream = gradient.double()
    (through_mlp,) = torch.autograd.grad(passed, stream, upstream, retain_graph=True)
    back = upstream + through_mlp
    out = stream + passed
    made = torch.autograd.grad(out, (x, *leaves.values()), upstream)
    shares = Shares(
        attention=_share(attention, stream),
        stream=_share(stream, out),
        mlp=_share(passed, out),
        mlp_back=_share(through_mlp, back),
        stream_back=_share(back, made[0]),
        attention_back=_share(made[0] - back, made[0]),
    )
    gradients = {f"grad.{name}": one for name, one in zip(("rows", *leaves), made, strict=True)}
    return {"forward": out.detach(), **gradients}, shares


def _share(part: Any, whole: Any) -> float:
    return float((part.detach().norm() / whole.detach().norm()) ** 2)


def attention_branch(
    rows: Any, weights: Mapping[str, Any], seen: Any, rope: tuple[Any, Any] | None, *,
    eps: float, heads: int, groups: int, width: int,
) -> Any:  # fmt: skip
    """out(attention(rope(qkv(norm(rows))))), [B, T, hidden] -> [B, T, hidden]."""
    mixed = norm_linear({**weights, "input": rows}, eps, "qkv.")
    query, key, value = torch.stack(mixed.split(width, dim=-1), dim=1).split([heads, groups, groups], dim=1)
    if rope is not None:
        query, key = turn(query, *rope), turn(key, *rope)
    joined = torch.cat(attend(query, key, value, seen).unbind(1), dim=-1)
    return torch.einsum("btc,nc->btn", joined, weights["out.weight"])


def turn(heads: Any, cos: Any, sin: Any) -> Any:
    """Each pair (j, j + D/2) of [B, H, T, D] turned by the angle of its position, as one complex number."""
    length, half = heads.shape[2], heads.shape[3] // 2
    turned = torch.complex(heads[..., :half], heads[..., half:]) * torch.complex(cos[:length], sin[:length])
    return torch.cat((turned.real, turned.imag), dim=-1)


# --- experts --------------------------------------------------------------------------------------------------------


def expert_bank(rows: Any, weights: Sequence[Any], counts: Sequence[int]) -> Any:
    """One linear layer an expert: [R, K] -> [R, N]; differentiable."""
    parts = rows.split(list(counts))
    return torch.cat([torch.einsum("rk,nk->rn", *pair) for pair in zip(parts, weights, strict=True)])
