"""The matrix-state recurrent layer (R): mLSTM with exponential gates, stabilised, chunked and exact.

Source: Beck et al. 2024, xLSTM, arXiv:2405.04517, eq. 19 to 27; the block without convolution and the
first biases of the gates as in Beck et al. 2025, xLSTM 7B, arXiv:2503.13427. Gates and states are computed in fp32 at
least, also inside an autocast region.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from .mamba import at_least_fp32, segment_sums, split_chunks, widest
from .norms import INIT_STD, NormLinear, without_autocast

FIRST_INPUT_BIAS: Final = -10.0  # the input gate starts almost shut
FIRST_FORGET_BIASES: Final = (3.0, 6.0)  # from the first head to the last: memories of about 20 to 400 steps


@dataclass(frozen=True, eq=False)
class MatrixState:
    """What a head remembers; the true memory and key sum are exp(scale) times what is stored.

    Attributes:
        memory: [B, H, K, V] fp32 at least, the sum of k v^T.
        keys: [B, H, K] fp32 at least, the sum of k: the normaliser n of the paper.
        scale: [B, H] fp32 at least, >= 0: the stabiliser m of the paper.
    """

    memory: Any
    keys: Any
    scale: Any


def matrix_recurrence_chunked(
    query: Any, key: Any, value: Any, input_gate: Any, forget_gate: Any, *, chunk: int
) -> tuple[Any, MatrixState]:
    """The recurrence by chunks: matrix products inside a chunk, a recurrence from one to the next.

        S_t = f_t S_{t-1} + i_t k_t v_t^T,   n_t = f_t n_{t-1} + i_t k_t,   y_t = q_t S_t / max(|q_t n_t|, 1)

    with i = exp(input_gate), f = sigmoid(forget_gate) and q scaled by 1 / sqrt(K).

    S and n are kept divided by exp(m), so that no exponential exceeds 1: m is the maximum, over all that a step sees at
    once, of the logs of its weights and 0. The paper's m has no 0 in the maximum; with it exp(-m), which stands for the
    1 of the divisor, cannot overflow either, and what underflows is nothing beside that 1. The divisor over exp(m) is
    held above the machine epsilon. The outputs do not depend on m.

    Args:
        query, key: [B, T, H, K]; T need not be a multiple of `chunk`.
        value: [B, T, H, V].
        input_gate, forget_gate: [B, T, H], before exp and sigmoid.
        chunk: steps of a chunk.

    Returns:
        y [B, T, H, V] in the dtype of `value`, and the state after the last step.
    """
    length = query.shape[1]
    chunk = min(chunk, length)
    wide = widest(query, key, value, input_gate, forget_gate)
    with without_autocast(query):
        q = split_chunks(query.to(wide) / math.sqrt(key.shape[3]), chunk)
        k, v = split_chunks(key.to(wide), chunk), split_chunks(value.to(wide), chunk)
        log_forget = functional.logsigmoid(forget_gate.to(wide))
        # A padded step forgets nothing, log f = 0, and takes nothing in, k = v = 0.
        decay = split_chunks(log_forget, chunk).transpose(2, 3)  # [B, S, H, L]
        gate_in = split_chunks(input_gate.to(wide), chunk).transpose(2, 3)
        logs = segment_sums(decay) + gate_in.unsqueeze(-2)  # [B, S, H, L, L], of step m as step l sees it
        since_start = decay.cumsum(dim=-1)
        entering, last = _carry(k, v, logs[..., -1, :], since_start[..., -1])
        y = _read(q, k, v, logs, since_start, entering)
    return y.flatten(1, 2)[:, :length].to(value.dtype), last


def _carry(k: Any, v: Any, leaving: Any, total: Any) -> tuple[MatrixState, MatrixState]:
    """The states that enter each chunk, stacked along S, and the one that leaves the last.

    Args:
        k, v: [B, S, L, H, K] and [B, S, L, H, V].
        leaving: [B, S, H, L] log weight of each step at the end of its chunk.
        total: [B, S, H] log decay over each chunk.
    """
    top = leaving.amax(dim=-1).clamp(min=0)
    weighted = (leaving - top.unsqueeze(-1)).exp().transpose(2, 3).unsqueeze(-1) * k
    memories, key_sums = torch.einsum("bslhk,bslhv->bshkv", weighted, v), weighted.sum(dim=2)
    state = MatrixState(*(torch.zeros_like(one[:, 0]) for one in (memories, key_sums, top)))
    entering = []
    for index in range(k.shape[1]):
        entering.append(state)
        before = total[:, index] + state.scale
        scale = torch.maximum(before, top[:, index])
        kept, new = (before - scale).exp().unsqueeze(-1), (top[:, index] - scale).exp().unsqueeze(-1)
        state = MatrixState(
            memory=kept.unsqueeze(-1) * state.memory + new.unsqueeze(-1) * memories[:, index],
            keys=kept * state.keys + new * key_sums[:, index],
            scale=scale,
        )
    names = ("memory", "keys", "scale")
    return MatrixState(*(torch.stack([getattr(item, name) for item in entering], dim=1) for name in names)), state


def _read(q: Any, k: Any, v: Any, logs: Any, since_start: Any, entering: MatrixState) -> Any:
    """What each step reads, [B, S, L, H, V]: from its chunk up to itself, and from the state that entered it."""
    before = since_start + entering.scale.unsqueeze(-1)  # [B, S, H, L]
    scale = torch.maximum(logs.amax(dim=-1), before).clamp(min=0)
    within = torch.einsum("bslhk,bsmhk->bshlm", q, k) * (logs - scale.unsqueeze(-1)).exp()
    carried = (before - scale).exp()
    found = torch.einsum("bshlm,bsmhv->bslhv", within, v)
    found = found + carried.transpose(2, 3).unsqueeze(-1) * torch.einsum("bslhk,bshkv->bslhv", q, entering.memory)
    weight = within.sum(dim=-1) + carried * torch.einsum("bslhk,bshk->bshl", q, entering.keys)
    return found / _divisor(weight, scale).transpose(2, 3).unsqueeze(-1)


def _divisor(weight: Any, scale: Any) -> Any:
    """max(|q n|, 1) over exp(scale).

    Where the state is large and q n is rounding noise beside the keys that were summed, nothing is divided by the
    noise: the machine epsilon is the least. It also keeps a query of zeros from 0 / 0 once exp(-scale) underflows.
    """
    return torch.maximum(weight.abs(), (-scale).exp()).clamp(min=torch.finfo(weight.dtype).eps)


class MatrixRecurrentBlock(nn.Module):
    """x + out(sigmoid(o) * norm(recurrence(q, k, v, i, f))), everything projected from the normed x at once.

    Args:
        hidden: width of the rows.
        num_heads: H.
        key_dim, value_dim: K and V of a head.
        chunk: of the recurrence.
        eps: of both norms.
        dtype, device: of the parameters.

    Attributes:
        in_projection: `NormLinear` with weight [H * (2K + 2V + 2), hidden]; its rows are, in order, query and key
            [H * K each], value and output gate [H * V each], input and forget gates [H each].
        input_bias, forget_bias: [H], added to the gates.
        norm_weight: [H * V] of the RMSNorm of each head.
        out_projection: nn.Linear(H * V, hidden).
    """

    def __init__(
        self,
        hidden: int,
        *,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        chunk: int = 64,
        eps: float = 1e-5,
        dtype: Any = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.hidden, self.num_heads, self.key_dim, self.value_dim = hidden, num_heads, key_dim, value_dim
        self.chunk, self.eps = chunk, eps
        keys, values = num_heads * key_dim, num_heads * value_dim
        self.widths = [keys, keys, values, values, num_heads, num_heads]
        made = {"dtype": dtype, "device": device}
        self.in_projection = NormLinear(hidden, sum(self.widths), eps=eps, **made)
        self.input_bias = nn.Parameter(torch.full((num_heads,), FIRST_INPUT_BIAS, **made))
        self.forget_bias = nn.Parameter(torch.linspace(*FIRST_FORGET_BIASES, num_heads).to(**made))
        self.norm_weight = nn.Parameter(torch.ones(values, **made))
        self.out_projection = nn.Linear(values, hidden, bias=False, **made)
        for projection in (self.in_projection, self.out_projection):
            nn.init.normal_(projection.weight, std=INIT_STD)

    def forward(self, rows: Any) -> Any:
        """[B, T, hidden] -> [B, T, hidden]; each row sees itself and those before it."""
        query, key, value, gate_out, gate_in, forget = self.in_projection(rows).split(self.widths, dim=-1)
        y, _ = matrix_recurrence_chunked(
            query.unflatten(-1, (self.num_heads, self.key_dim)),
            key.unflatten(-1, (self.num_heads, self.key_dim)),
            value.unflatten(-1, (self.num_heads, self.value_dim)),
            at_least_fp32(gate_in) + at_least_fp32(self.input_bias),
            at_least_fp32(forget) + at_least_fp32(self.forget_bias),
            chunk=self.chunk,
        )
        return rows + self.out_projection(self._gated_norm(y, gate_out))

    def _gated_norm(self, y: Any, gate: Any) -> Any:
        """RMSNorm of each head, then the output gate; [B, T, H, V] and [B, T, H * V] -> [B, T, H * V]."""
        wide = at_least_fp32(y)
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        gated = normed.flatten(-2) * at_least_fp32(self.norm_weight) * torch.sigmoid(at_least_fp32(gate))
        return gated.to(y.dtype)
