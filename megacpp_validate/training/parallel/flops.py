"""What a hybrid model needs in floating-point operations: per token, forward, by kind of block and part.

A multiply-add counts two. Counted are products and recurrences, not norms, activations or rotations: the convention of
PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B) and of Megatron-LM's own throughput (Narayanan et al. 2021,
arXiv:2104.04473, appendix). A weight costs 2 a token forward, and twice that backward (Kaplan et al. 2020,
arXiv:2001.08361, section 2.1). Attention is counted as far as it is causal: a query sees (T + 1) / 2 keys in the mean.

Of the scans the recurrence is counted that the layer stands for, not what a chunked kernel makes of it: a model needs
no more operations for another chunk size.
"""

from __future__ import annotations

from typing import Final

from ..pattern import Letter
from ..sizes import Size

CONVOLUTION: Final = 4  # taps of the convolution of M (`native.mamba.Mamba2Mixer`)
BACKWARD: Final = 2  # times the forward: the gradient of the rows, and that of the weights
# FLOP/s of one device, dense: half of what the datasheet gives with sparsity (NVIDIA H200 Tensor Core GPU, SXM: 1,979
# and 3,958 TFLOPS).
PEAK: Final[dict[str, dict[str, float]]] = {"h200": {"bf16": 989.5e12, "fp8": 1979e12}}


def block_flops(letter: Letter, size: Size) -> dict[str, float]:
    """Part -> FLOPs a token, forward, of one block."""
    attention = _latent_attention if size.attention == "mla" else _attention
    return {"A": attention, "M": _mamba, "E": _experts, "R": _recurrent}[letter](size)


def forward_flops(size: Size) -> dict[str, float]:
    """Kind of block, "head", and "mtp" where there is one -> FLOPs a token, forward, of all of its blocks.

    The head of the token after the next one is a projection of two widths to one, the last block and the head again;
    it is counted at every position, as it is computed.
    """
    kinds: dict[str, float] = {}
    for letter in size.letters:
        kinds[letter] = kinds.get(letter, 0.0) + sum(block_flops(letter, size).values())
    head = 2.0 * size.hidden * size.vocabulary
    if not size.mtp:
        return {**kinds, "head": head}
    joined = 2.0 * 2 * size.hidden * size.hidden
    return {**kinds, "head": head, "mtp": joined + sum(block_flops(size.letters[-1], size).values()) + head}


def training_flops(size: Size) -> float:
    """FLOPs a token, forward and backward, of the whole model; what is recomputed does not count."""
    return (1 + BACKWARD) * sum(forward_flops(size).values())


def _attention(size: Size) -> dict[str, float]:
    inner = size.num_heads * size.head_dim
    projected = inner + 2 * size.num_gqa_groups * size.head_dim
    return {
        "projections": 2.0 * size.hidden * (projected + inner),
        "attention": 2 * 2.0 * inner * (size.length + 1) / 2,  # scores, and their sum of values
        "mlp": 2.0 * size.hidden * size.ffn_hidden * 3,
    }


def _latent_attention(size: Size) -> dict[str, float]:
    """Multi-head latent attention (`native.mla`): keys and values are made of the latent, and whole when multiplied."""
    inner = size.num_heads * size.head_dim
    down = size.kv_latent + size.rope_dim
    up = inner - size.num_heads * size.rope_dim + inner  # the keys but for their shared slice, and the values
    return {
        **_attention(size),
        "projections": 2.0 * (size.hidden * (inner + down) + size.kv_latent * up + inner * size.hidden),
    }


def _experts(size: Size) -> dict[str, float]:
    parts = {
        "router": 2.0 * size.hidden * size.num_experts,
        "experts": 2.0 * size.hidden * size.expert_width * 3 * size.top_k,
    }
    if not size.shared_experts:
        return parts
    return {**parts, "shared": 2.0 * size.hidden * size.expert_width * 3 * size.shared_experts}


def _mamba(size: Size) -> dict[str, float]:
    inner, mixed = 2 * size.hidden, 2 * size.hidden + 2 * size.mamba_state
    return {
        "projections": 2.0 * size.hidden * (inner + mixed + inner // size.mamba_head_dim + inner),
        "convolution": 2.0 * CONVOLUTION * mixed,
        "scan": 5.0 * inner * size.mamba_state,  # h = a h + x b: 3; y = h c: 2
    }


def _recurrent(size: Size) -> dict[str, float]:
    heads, key, value = size.recurrent_heads, size.recurrent_key_dim, size.recurrent_value_dim
    return {
        "projections": 2.0 * size.hidden * heads * (2 * key + 2 * value + 2 + value),
        "recurrence": 5.0 * heads * key * (value + 1),  # S = f S + i k v: 3; q S: 2; the same for n, of width 1
    }
