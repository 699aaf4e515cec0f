"""TE attention wrapper: dot-product attention by Transformer Engine, else FlashAttention 3 or 4, else plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import nn

from ..native.attention import attention as native_attention
from ..native.attention import attention_mask, masked_attention
from ..native.norms import without_autocast
from ..native.sparse_attention import sampled_attention
from . import imports as te
from .backends import Choice, Refusal, check_backends, choose
from .errors import MaskConflict, NotDivisible, WrongDtype, WrongOption, WrongShape, WrongTarget
from .extra_state import tolerate_extra_state
from .features import PRODUCTION, Features, why_not_te
from .flash_attention import KERNELS, flash_attention, why_not_flash
from .recipes import TE_DTYPES

# --- masks: the options of a call besides causality, and the backends that refuse them ---

Backend = Literal["te", "fa3", "fa4", "sdpa"]
BACKENDS: Final[tuple[Backend, ...]] = ("te", "fa3", "fa4", "sdpa")
"""Every attention backend in the order in which they are asked."""

_INTEGERS: Final = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})


@dataclass(frozen=True)
class RefusedOption:
    """One option of a call that some backends never take.

    Attributes:
        code: short and stable; receipts and tests compare it.
        option: name of the option of the call.
        backends: the backends that refuse the option.
        reason: why, with the next step.
    """

    code: str
    option: str
    backends: frozenset[Backend]
    reason: str


REFUSED_OPTIONS: Final = (
    RefusedOption(
        "sampled-tokens",
        "indices",
        frozenset({"te", "fa3", "fa4"}),
        "DSA sample attention runs over the tokens that an indexer picked for each query, which no fused kernel here "
        "takes; it runs in plain PyTorch (native.sparse_attention.sampled_attention). Next step: leave out indices for "
        "dense attention",
    ),
    RefusedOption(
        "packed-documents",
        "doc_ids",
        frozenset({"te", "fa3", "fa4"}),
        "a packed-document mask is given as data (doc_ids), which a fused kernel takes only as an arbitrary mask or in "
        "another layout, with lengths read back to the host. Next step: leave out doc_ids where every row is one "
        "document",
    ),
    RefusedOption(
        "local-window",
        "window",
        frozenset({"te"}),
        "the local-window mask of DeepSeek sparse attention stays outside Transformer Engine: which of its backends "
        "takes a window changes with release, architecture and precision. Next step: leave out window for global "
        "attention",
    ),
    RefusedOption(
        "block-routing",
        "block_mask",
        frozenset({"te", "fa3", "fa4"}),
        "MoBA top-k routing chooses key blocks by head and query, which no fused kernel here takes; it runs in plain "
        "PyTorch (native.sparse_attention.route_blocks makes the mask). Next step: leave out block_mask for dense "
        "attention",
    ),
    RefusedOption(
        "soft-cap",
        "softcap",
        frozenset({"te", "fa3"}),
        "soft-capped logits have no fused kernel in most releases of Transformer Engine, and FlashAttention 3 may be "
        "built without them. Next step: leave out softcap, or expect a slower path",
    ),
)


@dataclass(frozen=True, eq=False)
class Masks:
    """The mask options of one call.

    Attributes:
        causal: whether a query sees no later key.
        doc_ids: [B, T] integers; a query sees the keys of its own document.
        window: a query sees itself and the window - 1 keys before it.
        softcap: logits become softcap * tanh(logits / softcap).
        block_mask: [B or 1, H or 1, T or N, N] bool for N = ceil(T / block_size); which key blocks each query or query
            block sees (MoBA, arXiv:2502.13189), within the causal mask.
        block_size: tokens in a block.
        indices: [B, T, K] int64; which tokens each query sees (DSA), as `native.sparse_attention.pick_tokens` gives
            them.
    """

    causal: bool = True
    doc_ids: Any = None
    window: int | None = None
    softcap: float | None = None
    block_mask: Any = None
    block_size: int | None = None
    indices: Any = None

    def refused_by(self, backend: Backend) -> Refusal | None:
        """Why this backend refuses the call: the first row of `REFUSED_OPTIONS` that applies; None where none does."""
        for row in REFUSED_OPTIONS:
            if backend in row.backends and getattr(self, row.option) is not None:
                return Refusal(backend, row.code, row.reason)
        return None

    def check(self, batch: int, heads: int, length: int, device: Any) -> None:
        """Refuse options that `heads` heads over `length` tokens cannot have; reads no tensor's values.

        Raises:
            MaskConflict: two kinds of mask that contradict each other.
            WrongOption: a window or soft cap that is not positive, or a block mask without its size.
            WrongShape, WrongDtype, WrongTarget: a mask of another shape or dtype, or on another device.
        """
        _check_conflicts(self)
        for name in ("window", "softcap", "block_size"):
            if (number := getattr(self, name)) is not None and not is_positive(number):
                raise WrongOption(f"{name} is {number!r}. Next step: pass a positive number, or leave out {name}.")
        for name in ("doc_ids", "block_mask", "indices"):
            # Not every kernel raises for a mask on another device; some return garbage.
            if (mask := getattr(self, name)) is not None and mask.device != device:
                raise WrongTarget(f"{name} lies on {mask.device}. Next step: {name}.to({str(device)!r}).")
        if self.doc_ids is not None:
            _check_doc_ids(self.doc_ids, batch, length)
        if self.block_mask is not None or self.block_size is not None:
            _check_blocks(self.block_mask, self.block_size, batch, heads, length)


def is_positive(number: float) -> bool:
    """Whether a number is finite and above zero."""
    return math.isfinite(number) and number > 0


# Options that a backend combines; of all others each is given alone.
_TOGETHER: Final = (("doc_ids", "softcap"), ("window", "softcap"), ("doc_ids", "indices"))


def _check_conflicts(masks: Masks) -> None:
    names = ("doc_ids", "window", "softcap", "block_mask", "indices")
    given = tuple(name for name in names if getattr(masks, name) is not None)
    if len(given) > 1 and given not in _TOGETHER:
        raise MaskConflict(f"{' and '.join(given)} are given together. Next step: pass one; no backend combines them.")
    if not masks.causal and (masks.window is not None or masks.indices is not None):
        raise MaskConflict("window and indices are of past tokens alone. Next step: leave out causal=False.")


def _check_doc_ids(doc_ids: Any, batch: int, length: int) -> None:
    if tuple(doc_ids.shape) != (batch, length):
        raise WrongShape(
            f"doc_ids have shape {tuple(doc_ids.shape)}, wanted [B, T] = {(batch, length)}: one document number for "
            "each token. Next step: number the documents of each row."
        )
    if doc_ids.dtype not in _INTEGERS:
        raise WrongDtype(f"doc_ids are {doc_ids.dtype}; wanted integers. Next step: doc_ids.to(torch.int32).")


def _check_blocks(block_mask: Any, size: int | None, batch: int, heads: int, length: int) -> None:
    if block_mask is None or size is None:
        raise WrongOption("block_mask and block_size belong together. Next step: pass both, or neither.")
    if block_mask.dtype != torch.bool:
        raise WrongDtype(f"block_mask is {block_mask.dtype}; wanted bool. Next step: block_mask.bool().")
    blocks = math.ceil(length / size)
    shape = tuple(block_mask.shape)
    wanted = ((1, batch), (1, heads), (length, blocks), (blocks,))
    if len(shape) != 4 or any(one not in sizes for one, sizes in zip(shape, wanted, strict=True)):
        raise WrongShape(
            f"block_mask has shape {shape}, wanted [B or 1, H or 1, T or T / {size}, T / {size}] = "
            f"{(batch, heads, (length, blocks), blocks)}, rounded up. Next step: route over all blocks of the sequence."
        )


# --- the layer ---

NATIVE_PATH = "torch.nn.functional.scaled_dot_product_attention"

# Seen on an H200, 2026-11-21: Transformer Engine 2.12.0 raises in cuDNN ("s_q = s_kv = 1 is not supported"); 2.20.2
# hands the call to FlashAttention 4 where that is installed, and gets zeros back.
SINGLE: Final = (
    "attention over a single token gives its value back, and fused kernels fail at it or give zeros. Next step: none, "
    "plain PyTorch is exact here"
)
DTYPES: Final = TE_DTYPES | {torch.float64}


class TeAttention(nn.Module):
    """Scaled dot-product attention by Transformer Engine; RoPE is applied before the call.

    Args:
        num_heads: query heads H, of all tensor-parallel ranks.
        head_dim: D.
        num_gqa_groups: key and value heads, of all ranks; divides H.
        softmax_scale: factor on the scores; None is 1 / sqrt(D).
        tp_size, tp_group: tensor parallelism over heads.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_gqa_groups: int,
        softmax_scale: float | None = None,
        tp_size: int = 1,
        tp_group: Any = None,
    ) -> None:
        super().__init__()
        self.inner = te.dot_product_attention.require()(
            num_attention_heads=num_heads,
            kv_channels=head_dim,
            num_gqa_groups=num_gqa_groups,
            qkv_format="bshd",
            attn_mask_type="causal",
            attention_type="self",
            softmax_scale=softmax_scale,
            tp_size=tp_size,
            tp_group=tp_group,
        )

    def forward(self, query: Any, key: Any, value: Any, *, mask: Literal["causal", "no_mask"] = "causal") -> Any:
        """Query [B, H, T, D], key and value [B, G, T, D] -> [B, H, T, D].

        Tensors that lie in memory as [B, T, H, D] are not copied; all others are. TE ignores strides: it reads a
        transposed view as if the view were contiguous, and returns wrong numbers without an error (2.20.2 on an H200,
        2026-11-21, relative error 1.2). Contiguous tensors also pass the check of packed layouts that 2.19 added for
        torch.compile, whatever their values.
        """
        batch, heads, length, width = query.shape
        rows = self._modules["inner"](  # nn.Module's own look-up costs a microsecond
            query.transpose(1, 2).contiguous(),
            key.transpose(1, 2).contiguous(),
            value.transpose(1, 2).contiguous(),
            qkv_format="bshd",
            attn_mask_type=mask,
            window_size=(-1, 0) if mask == "causal" else (-1, -1),
            core_attention_bias_type="no_bias",
        )
        return rows.view(batch, length, heads, width).transpose(1, 2)


class Attention(nn.Module):
    """Scaled dot-product self-attention over [B, H, T, D]; RoPE is applied before the call.

    The first backend in the given order that does not refuse takes the call; `choice` records that backend and the
    reasons of those before it.

    Args:
        num_heads: query heads H, of all tensor-parallel ranks.
        head_dim: D.
        num_gqa_groups: key and value heads G, of all ranks; divides H. Query head h uses group h // (H / G).
        softmax_scale: factor on the scores; None is 1 / sqrt(D).
        backends: backends to ask, in this order; "sdpa" is plain PyTorch and takes every call.
        features: whether Transformer Engine may be used.
        device: where the module runs, which decides whether TE's layer is built; by default "cuda" where CUDA is
            available, else "cpu".
        tp_size, tp_group: tensor parallelism over heads; tensors then hold this rank's H / tp_size heads.

    Attributes:
        choice: of the last call; None before the first.

    Raises:
        NotDivisible: heads, groups and ranks do not divide.
        WrongOption: a scale that is not positive.
        UnknownName: an unknown backend.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_gqa_groups: int,
        softmax_scale: float | None = None,
        backends: Sequence[Backend] = BACKENDS,
        features: Features = PRODUCTION,
        device: Any = None,
        tp_size: int = 1,
        tp_group: Any = None,
    ) -> None:
        super().__init__()
        check_heads(num_heads, num_gqa_groups, head_dim, tp_size)
        check_backends(backends, BACKENDS)
        if softmax_scale is not None and not is_positive(softmax_scale):
            raise WrongOption(f"softmax_scale is {softmax_scale!r}. Next step: pass a positive number, or None.")
        self.heads, self.groups, self.head_dim = num_heads // tp_size, num_gqa_groups // tp_size, head_dim
        self.softmax_scale = softmax_scale
        self.backends, self.features = tuple(backends), features
        self.choice: Choice | None = None
        self.te: TeAttention | None = None
        self._decided: tuple[tuple[object, ...], Choice, str] | None = None
        tolerate_extra_state(self)
        kind = device if device is not None else ("cuda" if torch.cuda.is_available() else "cpu")
        if "te" in backends and why_not_te(features, "attention", kind) is None:
            self.te = TeAttention(
                num_heads=num_heads,
                head_dim=head_dim,
                num_gqa_groups=num_gqa_groups,
                softmax_scale=softmax_scale,
                tp_size=tp_size,
                tp_group=tp_group,
            )

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        *,
        causal: bool = True,
        doc_ids: Any = None,
        window: int | None = None,
        softcap: float | None = None,
        block_mask: Any = None,
        block_size: int | None = None,
        indices: Any = None,
    ) -> Any:
        """Attend.

        Args:
            query: [B, H, T, D]; fp32, fp16, bf16, or fp64 ("sdpa" only).
            key, value: [B, G, T, D], same dtype and device.
            causal: whether a query sees no later key.
            doc_ids: [B, T] integers, packed documents: a query sees only keys of its own document.
            window: a query sees itself and the window - 1 keys before it; needs `causal`.
            softcap: logits become softcap * tanh(logits / softcap).
            block_mask: [B or 1, H or 1, T or N, N] bool for N blocks: MoBA's routing, which key blocks each query, or
                query block, sees.
            block_size: tokens in a block.
            indices: [B, T, K] int64: DSA, which tokens each query sees; with `doc_ids`, in its own document.

        Returns:
            [B, H, T, D] in the dtype of `query`, also inside an autocast region; rows that see no key are zero.

        Raises:
            WrongShape, WrongDtype, WrongTarget: tensors of another rank, layout, size, dtype or device.
            MaskConflict, WrongOption: contradicting or invalid options.
            NoBackend: every backend refuses.
        """
        call = (
            query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype, query.device, key.device,
            value.device, causal, window, softcap, block_size,
        )  # fmt: skip
        decided = self._decided  # a call like the last one is not checked, chosen and recorded again
        is_plain = doc_ids is None and block_mask is None and indices is None
        if decided is not None and is_plain and decided[0] == call:
            _, taken, kind = decided
        else:
            masks = Masks(causal, doc_ids, window, softcap, block_mask, block_size, indices)
            taken = self._decide(query, key, value, masks, call)
            kind = query.device.type
        te_layer, mask = self._modules.get("te"), "causal" if causal else "no_mask"
        if taken.observed == "te" and te_layer is not None:
            if not torch.is_autocast_enabled(kind):  # to enter a region costs more than to ask
                return te_layer.forward(query, key, value, mask=mask)
            with without_autocast(query):
                return te_layer.forward(query, key, value, mask=mask)
        masks = Masks(causal, doc_ids, window, softcap, block_mask, block_size, indices)
        return _attend(taken.observed, query, key, value, masks, self.softmax_scale)

    def _decide(self, query: Any, key: Any, value: Any, masks: Masks, call: tuple[object, ...]) -> Choice:
        """Check a call and choose its backend; `__dict__` is written because nn.Module's own assignment is slow."""
        self._check(query, key, value)
        masks.check(query.shape[0], query.shape[1], query.shape[2], query.device)
        # Backends after the chosen one are not asked: asking FlashAttention 3 loads another CUDA runtime, and then
        # Transformer Engine 2.12 raises "Multiple libcudart libraries found" (seen 2026-11-21).
        taken = choose("attention", [(name, partial(self._refusal, name, query, masks)) for name in self.backends])
        is_plain = masks.doc_ids is None and masks.block_mask is None and masks.indices is None
        self.__dict__.update(choice=taken, _decided=(call, taken, query.device.type) if is_plain else None)
        return taken

    def _refusal(self, backend: Backend, query: Any, masks: Masks) -> Refusal | None:
        if (refused := masks.refused_by(backend)) is not None:
            return refused
        if backend == "sdpa":
            return None
        if query.shape[2] == 1:
            return Refusal(backend, "one-token", SINGLE)
        if backend == "te":
            return self._why_not_te(query)
        return why_not_flash(KERNELS[backend], query, softcap=masks.softcap)

    def _why_not_te(self, query: Any) -> Refusal | None:
        if (refused := why_not_te(self.features, "attention", query.device)) is not None:
            return refused
        if query.dtype not in TE_DTYPES:
            return Refusal("te", "dtype", f"Transformer Engine has no attention in {query.dtype}")
        if self.te is None:
            return Refusal("te", "made-elsewhere", "the module was built for a device without Transformer Engine")
        return None

    def _check(self, query: Any, key: Any, value: Any) -> None:
        shape = tuple(query.shape)
        fits = len(shape) == 4 and shape[1] == self.heads and shape[3] == self.head_dim and shape[0] > 0 < shape[2]
        keys = (shape[0], self.groups, shape[2], self.head_dim) if fits else ()
        if not fits or tuple(key.shape) != keys or tuple(value.shape) != keys:
            raise WrongShape(
                f"query {shape}, key {tuple(key.shape)}, value {tuple(value.shape)}; wanted [B, {self.heads}, T, "
                f"{self.head_dim}], and key and value [B, {self.groups}, T, {self.head_dim}], not empty. Likely cause: "
                "another layout ([B, T, H, D] or [T, B, H, D]). Next step: transpose to heads first."
            )
        if query.dtype not in DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
            raise WrongDtype(
                f"query {query.dtype}, key {key.dtype}, value {value.dtype}; wanted one of "
                f"{', '.join(sorted(map(str, DTYPES)))} for all three. Next step: cast them before the call."
            )
        if key.device != query.device or value.device != query.device:
            raise WrongTarget(
                f"query lies on {query.device}, key on {key.device}, value on {value.device}. Next step: move them to "
                "one device."
            )


def check_heads(heads: int, groups: int, head_dim: int, tp_size: int) -> None:
    """Refuse head counts that do not divide (NotDivisible)."""
    if min(heads, groups, head_dim, tp_size) < 1 or heads % groups or heads % tp_size or groups % tp_size:
        raise NotDivisible(
            f"{heads} query heads of size {head_dim} in {groups} groups over {tp_size} tensor-parallel ranks: each is "
            "1 or more, groups divide heads, and ranks divide groups. Next step: choose num_gqa_groups among the "
            f"divisors of {heads}, and tp_size among the divisors of num_gqa_groups."
        )


def _attend(backend: str, query: Any, key: Any, value: Any, masks: Masks, scale: float | None) -> Any:
    """Attention by FlashAttention or plain PyTorch: [B, H, T, D]."""
    causal, window, softcap = masks.causal, masks.window, masks.softcap
    kernels = KERNELS.get(backend)
    if kernels is not None:
        return flash_attention(kernels, query, key, value, causal=causal, window=window, softcap=softcap, scale=scale)
    if masks.indices is not None:
        return sampled_attention(query, key, value, masks.indices, scale=scale, doc_ids=masks.doc_ids)[0]
    if masks.block_mask is not None:
        return _block_attention(query, key, value, masks, scale)
    return native_attention(
        query, key, value, causal=causal, scale=scale, doc_ids=masks.doc_ids, window=window, softcap=softcap
    )


def _block_attention(query: Any, key: Any, value: Any, masks: Masks, scale: float | None) -> Any:
    """Attention under a block mask, with zeros where a query sees nothing."""
    length, seen = query.shape[2], masks.block_mask
    if seen.shape[-2] != length:
        seen = seen.repeat_interleave(masks.block_size, dim=-2)[..., :length, :]
    seen = seen.repeat_interleave(masks.block_size, dim=-1)[..., :length]
    seen = seen & attention_mask(length, causal=masks.causal, device=query.device)
    sees_any = seen.any(dim=-1, keepdim=True)
    # A query without visible keys sees all keys, so that no kernel returns NaN, and is zeroed afterwards.
    out = masked_attention(query, key, value, seen | ~sees_any, scale=scale)
    return out.masked_fill(~sees_any, 0.0)
