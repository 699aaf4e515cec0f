"""What a call of attention may ask for besides a causal mask, who refuses it, and what cannot be asked at once.

The refusals are data: one row a kind of mask, read by `bridge.attention` and `bridge.native_block` alike.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from .backends import Refusal
from .errors import MaskConflict, WrongDtype, WrongOption, WrongShape, WrongTarget

Backend = Literal["te", "fa3", "fa4", "sdpa"]
BACKENDS: Final[tuple[Backend, ...]] = ("te", "fa3", "fa4", "sdpa")
"""Every attention backend in the order in which they are asked."""

_INTEGERS: Final = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})


@dataclass(frozen=True)
class RefusedOption:
    """One option of a call that some backends never take.

    Attributes:
        code: short and stable; what receipts and tests compare.
        option: name of the option of the call.
        backends: who refuses it.
        reason: for a person, with the way out.
    """

    code: str
    option: str
    backends: frozenset[Backend]
    reason: str


REFUSED_OPTIONS: Final = (
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
        "MoBA top-k routing chooses key blocks by head and query block, which no fused kernel here takes. Next step: "
        "leave out block_mask for dense attention",
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
    """What one call asks for.

    Attributes:
        causal: whether a query sees no later key.
        doc_ids: [B, T] integers; a query sees the keys of its own document.
        window: a query sees itself and the window - 1 keys before it.
        softcap: logits become softcap * tanh(logits / softcap).
        block_mask: [B or 1, H or 1, ceil(T / block_size), ceil(T / block_size)] bool; which key blocks each query block
            sees (MoBA, arXiv:2502.13189), within the causal mask.
        block_size: tokens in a block.
    """

    causal: bool = True
    doc_ids: Any = None
    window: int | None = None
    softcap: float | None = None
    block_mask: Any = None
    block_size: int | None = None

    def refused_by(self, backend: Backend) -> Refusal | None:
        """The first row of `REFUSED_OPTIONS` that this backend refuses this call for."""
        for row in REFUSED_OPTIONS:
            if backend in row.backends and getattr(self, row.option) is not None:
                return Refusal(backend, row.code, row.reason)
        return None

    def check(self, batch: int, heads: int, length: int, device: Any = None) -> None:
        """Refuse what cannot be asked of `heads` heads over `length` tokens; reads no tensor's values.

        A mask must lie on `device`; None leaves that to the caller.

        Raises:
            MaskConflict: two kinds of mask that cannot hold at once.
            WrongOption: a value that makes no sense, or a block mask without its size.
            WrongShape, WrongDtype, WrongTarget: a mask of another shape or dtype, or on another device.
        """
        if not isinstance(self.causal, bool):
            raise WrongOption(f"causal is {self.causal!r}. Next step: give True or False.")
        _check_conflicts(self)
        for name in ("doc_ids", "block_mask"):
            _check_tensor(name, getattr(self, name), device)
        if self.doc_ids is not None:
            _check_doc_ids(self.doc_ids, batch, length)
        if self.window is not None and (not _is_whole(self.window) or self.window < 1):
            raise WrongOption(
                f"window is {self.window!r}: a query must at least see itself. Next step: give a number of keys, 1 or "
                "more, or None for all of them."
            )
        if self.softcap is not None and not is_positive(self.softcap):
            raise WrongOption(
                f"softcap is {self.softcap!r}: logits are capped at plus and minus that. Next step: give a positive "
                "number, or None for no cap."
            )
        if self.block_mask is not None or self.block_size is not None:
            _check_blocks(self.block_mask, self.block_size, batch, heads, length)


def is_positive(number: Any) -> bool:
    """Whether this is a number of Python, finite and above zero."""
    real = isinstance(number, numbers.Real) and not isinstance(number, bool)
    return real and math.isfinite(number) and number > 0


def _is_whole(number: Any) -> bool:
    return isinstance(number, numbers.Integral) and not isinstance(number, bool)


def visible_keys(masks: Masks, length: int, device: Any) -> Any:
    """Which keys each query sees under a block mask: [B or 1, H or 1, T, T] bool."""
    size = masks.block_size
    blocks = masks.block_mask.repeat_interleave(size, dim=-2).repeat_interleave(size, dim=-1)
    seen = blocks[..., :length, :length]
    if not masks.causal:
        return seen
    return seen & torch.ones(length, length, dtype=torch.bool, device=device).tril()


def _check_conflicts(masks: Masks) -> None:
    given = [name for name in ("doc_ids", "window", "block_mask") if getattr(masks, name) is not None]
    if len(given) > 1:
        raise MaskConflict(
            f"{' and '.join(given)} are given at once; each of them alone decides which keys a query sees, and no "
            "backend combines them. Next step: give one of them."
        )
    if masks.window is not None and not masks.causal:
        raise MaskConflict(
            "window is given with causal=False; a local window ends at the query itself, so it is causal. Next step: "
            "leave causal on, or leave out window."
        )
    if masks.softcap is not None and masks.block_mask is not None:
        raise MaskConflict(
            "softcap and block_mask are given at once; no backend caps the logits of routed blocks. Next step: give "
            "one of them."
        )


def _check_tensor(name: str, mask: Any, device: Any) -> None:
    """Refuse a mask that is no tensor or lies elsewhere: not every kernel would raise, and some give garbage."""
    if mask is None:
        return
    if not torch.is_tensor(mask):
        raise WrongOption(f"{name} is a {type(mask).__name__}; wanted a tensor. Next step: torch.tensor({name}).")
    if device is not None and mask.device != device:
        raise WrongTarget(
            f"{name} lies on {mask.device}, and what it masks on {device}. Next step: {name}.to({str(device)!r})."
        )


def _check_doc_ids(doc_ids: Any, batch: int, length: int) -> None:
    if tuple(doc_ids.shape) != (batch, length):
        raise WrongShape(
            f"doc_ids have shape {tuple(doc_ids.shape)}, wanted [B, T] = {(batch, length)}: one document number a "
            "token. Next step: number the documents of each row."
        )
    if doc_ids.dtype not in _INTEGERS:
        raise WrongDtype(f"doc_ids are {doc_ids.dtype}; wanted integers. Next step: doc_ids.to(torch.int32).")


def _check_blocks(block_mask: Any, size: int | None, batch: int, heads: int, length: int) -> None:
    if block_mask is None or size is None or not _is_whole(size) or size < 1:
        raise WrongOption(
            f"block_mask and block_size belong together, and block_size ({size!r}) must be 1 or more. Next step: give "
            "both, or neither."
        )
    if block_mask.dtype != torch.bool:
        raise WrongDtype(f"block_mask is {block_mask.dtype}; wanted bool. Next step: block_mask.bool().")
    blocks = math.ceil(length / size)
    shape = tuple(block_mask.shape)
    fits = len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, heads) and shape[2:] == (blocks, blocks)
    if not fits:
        raise WrongShape(
            f"block_mask has shape {shape}, wanted [B or 1, H or 1, T / {size}, T / {size}] = "
            f"{(batch, heads, blocks, blocks)}, the last block counted where it is not full. Next step: route over all "
            "blocks of the sequence."
        )
