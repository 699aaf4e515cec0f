"""Sizes of the hybrid model, the forms of its parts, and the batches that it is trained on.

Widths and tokens are multiples of 16, so that every product of a block can run in every FP8 recipe of Hopper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal, get_args

from ..bridge.fp8_scope import Zones
from . import WrongSize, check_fields
from .language import Grammar

# Attention, Mamba, mixture of experts, recurrent; DSA (D), and DSA that reuses the tokens of the last D (S).
Letter = Literal["A", "M", "E", "R", "D", "S"]
MoePath = Literal["bridge", "padded", "jagged"]


@dataclass(frozen=True)
class Forms:
    """The form of each part.

    Attributes:
        moe: how tokens reach the experts of an E-layer: "bridge" (`bridge.permute` and `bridge.expert_gemm`, any
            backend and precision, numbers of rows on the host), "padded" (route, permute, pad, batched GEMM, unpad,
            unpermute: the plain form), or "jagged" (sort by expert, grouped GEMM, weighted scatter: the host
            waits for nothing, and once a layer where experts are shared out over ranks).
        compiled_scan: whether the scan of M is compiled by torch.compile.
        fused_residual_norm: whether a residual connection and the norm behind it are one kernel, where a norm is a
            layer of its own.
        fused_mla_ingress: whether the projections into MLA are one product.
        liger: whether the head's loss is made without logits, and norms and the MLP of MLA ask Liger first
            (`bridge.liger`).
        recompute: whether layers A, M and R keep nothing, and run again in the backward pass.
        expert_backends: which backends of `bridge.expert_gemm` the path "bridge" may ask, in this order.
        low_precision_experts: whether E-layers enter the low-precision scope where there is one.

    Raises:
        WrongSize: values of another type, or an unknown path.
    """

    moe: MoePath = "bridge"
    compiled_scan: bool = False
    fused_residual_norm: bool = False
    fused_mla_ingress: bool = False
    liger: bool = False
    recompute: bool = False
    expert_backends: tuple[Literal["te", "deep_gemm", "native"], ...] = ("te", "native")
    low_precision_experts: bool = True

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Size:
    """A hybrid model and its batches.

    Attributes:
        name: of the size.
        pattern: one letter a layer, over A, M, E, R, D, S. A D and the S-layers up to the next D are a group, whose
            layers attend to the tokens that the D picks.
        hidden: width of the residual stream.
        ffn_hidden: width F of the MLP of an A-block.
        num_heads, head_dim, num_gqa_groups: H, D and G of its attention.
        num_experts, top_k, expert_width: of an E-block: experts, experts a token, width F of each.
        aux_coefficient, z_coefficient: of the router's two losses.
        mamba_head_dim, mamba_state: P and N of an M-block.
        recurrent_heads, recurrent_key_dim, recurrent_value_dim: H, K and V of an R-block.
        chunk: of both scans.
        bf16_first, bf16_last: layers that stay out of the low-precision scope.
        attention: layer A: "gqa", the A-block; "mla", multi-head latent attention (DeepSeek-V2, arXiv:2405.04434); or
            "moba", the A-block over routed key blocks (arXiv:2502.13189).
        kv_latent, rope_dim: of MLA: width of what keys and values are compressed to, and of the slice of each key and
            query that carries rotary positions; not read of "gqa".
        moba_block, moba_top_k: of "moba": tokens a block, and blocks a query, its own among them.
        index_top_k, index_window, index_heads: of D: tokens a query, those of them that are just before it, itself
            among them, and heads of the indexer (DSA, arXiv:2512.02556).
        streams: residual streams; mHC (arXiv:2512.24880) mixes more than one around each layer.
        mtp: whether a head predicts the token after the next one (DeepSeek-V3, arXiv:2412.19437, section 2.2), through
            the last layer of the trunk, which it shares.
        mtp_coefficient: of its loss.
        shared_experts: experts that every token goes to beside those of the router, as one MLP of so many widths.
        trajectory_coefficient: of the loss that wants hidden states to move on straight lines; 0 is off.
        classes, words, lag: of the language; the vocabulary is classes * words.
        batch, length: B and T of a step, which reads [B, T + 1] tokens and predicts B * T of them.

    Raises:
        WrongSize: an unknown letter, or values of another type or out of range; all are named at once. Numbers that do
            not go together are refused by the layers that take them.
        WrongZone: zones that overlap.
    """

    name: str
    pattern: str
    hidden: int
    ffn_hidden: int
    num_heads: int
    head_dim: int
    num_gqa_groups: int
    num_experts: int
    top_k: int
    expert_width: int
    mamba_head_dim: int
    mamba_state: int
    recurrent_heads: int
    recurrent_key_dim: int
    recurrent_value_dim: int
    classes: int
    words: int
    lag: int
    batch: int
    length: int
    chunk: int = 64
    bf16_first: int = 1
    bf16_last: int = 1
    attention: Literal["gqa", "mla", "moba"] = "gqa"
    kv_latent: int = 64
    rope_dim: int = 16
    moba_block: int = 64
    moba_top_k: int = 3
    index_top_k: int = 64
    index_window: int = 16
    index_heads: int = 4
    streams: int = 1
    mtp: bool = False
    mtp_coefficient: float = 0.3
    shared_experts: int = 0
    trajectory_coefficient: float = 0.0
    aux_coefficient: float = 1e-2
    z_coefficient: float = 1e-3
    eps: float = 1e-5

    def __post_init__(self) -> None:
        check_fields(self, _faults(self), others=_LEAST)
        _ = self.zones

    @cached_property
    def letters(self) -> tuple[Letter, ...]:
        """The kind of each layer."""
        return tuple(self.pattern)  # type: ignore[arg-type]

    @property
    def block(self) -> dict[str, Any]:
        """The numbers of an A-block, by the names that its classes give them."""
        names = ("hidden", "ffn_hidden", "num_heads", "head_dim", "num_gqa_groups", "eps")
        return {name: getattr(self, name) for name in names}

    @property
    def mixer(self) -> dict[str, Any]:
        """The numbers of the mixer of an M-block beside its width, by the names that its classes give them."""
        return {"state": self.mamba_state, "head_dim": self.mamba_head_dim, "chunk": self.chunk, "eps": self.eps}

    @cached_property
    def zones(self) -> Zones:
        """Which layers stay in BF16."""
        return Zones(len(self.letters), self.bf16_first, self.bf16_last)

    @cached_property
    def grammar(self) -> Grammar:
        """The language's numbers, the vocabulary among them."""
        return Grammar(self.classes, self.words, self.lag)


_LEAST: Final = {"bf16_first": 0, "bf16_last": 0, "shared_experts": 0, "classes": 2, "words": 2}


def _faults(size: Size) -> Iterator[str]:
    shares = {name: value for name, value in vars(size).items() if isinstance(value, float)}
    yield from (f"{name} is {one!r}, and is from 0 to below 1" for name, one in shares.items() if not 0 <= one < 1)
    if not size.pattern or set(size.pattern) - set(get_args(Letter)):
        yield f"pattern is {size.pattern!r}, and has one of {', '.join(get_args(Letter))} for each layer"
    if "S" in size.pattern.partition("D")[0]:
        yield f"pattern is {size.pattern!r}, and has a layer S before the first D, whose tokens it would reuse"


def read_size(name: str, **changes: Any) -> Size:
    """A size by name, with single numbers changed.

    Raises:
        WrongSize: an unknown size or number, or as `Size`.
        WrongZone: as `Size`.
    """
    if name not in SIZES:
        raise WrongSize(f"unknown size {name!r}. Next step: choose one of {', '.join(SIZES)}.")
    return replace(SIZES[name], **changes)


SIZES: Final[dict[str, Size]] = {}
SIZES["tiny"] = Size(
    "tiny", "AMEAR", hidden=32, ffn_hidden=64, num_heads=2, head_dim=16, num_gqa_groups=1,
    num_experts=4, top_k=2, expert_width=32, mamba_head_dim=4, mamba_state=16,
    recurrent_heads=2, recurrent_key_dim=16, recurrent_value_dim=16,
    classes=4, words=8, lag=2, batch=8, length=32, chunk=16,
)  # fmt: skip
# Meant for one H200. The in-projection of M is 2192 = 16 * 137 wide.
SIZES["small"] = Size(
    "small", "AEMEAEMEAEMR", hidden=512, ffn_hidden=1536, num_heads=8, head_dim=64, num_gqa_groups=2,
    num_experts=8, top_k=2, expert_width=512, mamba_head_dim=64, mamba_state=64,
    recurrent_heads=4, recurrent_key_dim=64, recurrent_value_dim=128,
    classes=8, words=16, lag=2, batch=16, length=512,
)  # fmt: skip
# The scaled smoke test: 64 experts, 2.3 billion parameters, most of them experts'; it speaks the language of small.
SIZES["scaled"] = Size(
    "scaled", "AEMEAEMEAEMR", hidden=2048, ffn_hidden=5632, num_heads=16, head_dim=128, num_gqa_groups=4,
    num_experts=64, top_k=2, expert_width=1024, mamba_head_dim=64, mamba_state=128,
    recurrent_heads=8, recurrent_key_dim=128, recurrent_value_dim=256,
    classes=8, words=16, lag=2, batch=16, length=1024, mtp=True, shared_experts=1,
)  # fmt: skip
# What ablations train on one GPU: `scaled` with more tokens, and fewer experts, so that two of it fit on the GPU.
SIZES["single"] = replace(SIZES["scaled"], name="single", num_experts=8, batch=32, mtp=False, shared_experts=0)
# NVIDIA Nemotron 3 Nano 30B-A3B (config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16), scaled down by this rule.
# Depth: the first period, MEMEM*E, of 52 layers; "*" is A, which has an MLP here. Widths times 8/21, rounded down to a
# multiple of 16: hidden 2688 -> 1024, expert 1856 -> 704, shared expert 3712 -> 1408 (of A's MLP; the shared expert has
# the width of the others). Query heads alike: 32 -> 12. A quarter of the 128 experts. Kept: 6 experts a token and 1
# shared, 2 groups and heads of 128 in A, Mamba heads of 64 with a state of 128 (one group of B and C here, 8 there).
SIZES["nemotron3"] = Size(
    "nemotron3", "MEMEMAE", hidden=1024, ffn_hidden=1408, num_heads=12, head_dim=128, num_gqa_groups=2,
    num_experts=32, top_k=6, expert_width=704, shared_experts=1, mamba_head_dim=64, mamba_state=128,
    recurrent_heads=4, recurrent_key_dim=64, recurrent_value_dim=128,
    classes=8, words=16, lag=2, batch=16, length=1024,
)  # fmt: skip
# What the loss gate trains: as small as it can be with healthy FP8 well below the cap of the gate, and every product a
# multiple of 16. The routers have no losses of their own: those would drown the gradients of the quiet half.
SIZES["gate"] = Size(
    "gate", "AMEAR", hidden=256, ffn_hidden=512, num_heads=4, head_dim=64, num_gqa_groups=2,
    num_experts=4, top_k=2, expert_width=256, mamba_head_dim=32, mamba_state=64,
    recurrent_heads=4, recurrent_key_dim=32, recurrent_value_dim=64,
    classes=4, words=8, lag=2, batch=16, length=256, aux_coefficient=0.0, z_coefficient=0.0,
)  # fmt: skip
