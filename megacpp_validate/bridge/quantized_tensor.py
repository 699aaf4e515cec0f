"""Payload and scale of quantized tensors, whose dtype is bf16 and whose storage is FP8.

Code that does not know such a tensor dequantizes it silently, and loses what FP8 was meant to save. So this module is
the one place that dequantizes, with a reason.

Tensors are recognised by the name and module of their class, without an import: Transformer Engine's `Float8Tensor`,
`Float8BlockwiseQTensor` and `MXFP8Tensor` (2.1 to 2.20), torchao's `Float8TrainingTensor` of training
(0.13 and later) and `Float8Tensor` of inference. Their scales multiply but for torchao's of training, which divide.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch

from .backends import Refusal
from .errors import WrongDtype, WrongShape

# --- scaled payload ---------------------------------------------------------------------------------------------------
# Vendors differ in where scales lie, how they are padded and transposed, and whether they multiply or divide. Here
# scales lie as their blocks lie in the tensor, and `convention` says what they do.


Block = Literal["tensor", "row", "column", "1x128", "128x1", "128x128", "1x32", "32x1"]
Convention = Literal["multiply", "divide"]
Format = Literal["e4m3", "e5m2"]

FORMATS: Final[dict[Any, Format]] = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
# Rows and columns of a block; 0 for all there are.
SIZES: Final[dict[Block, tuple[int, int]]] = {
    "tensor": (0, 0), "row": (1, 0), "column": (0, 1), "1x128": (1, 128), "128x1": (128, 1), "128x128": (128, 128),
    "1x32": (1, 32), "32x1": (32, 1),
}  # fmt: skip


def blocks_of(block: Block, rows: int, columns: int) -> tuple[int, int]:
    """Blocks of rows and blocks of columns in [rows, columns]."""
    high, wide = SIZES[block]
    return -(-rows // high) if high else 1, -(-columns // wide) if wide else 1


@dataclass(frozen=True, eq=False)
class ScaledPayload:
    """Values in FP8 and what turns them into numbers.

    Attributes:
        payload: [..., K] in float8_e4m3fn or float8_e5m2, of the tensor's own shape; a view where stored transposed.
        scale: [blocks of rows, blocks of K] in fp32 or, of MXFP8, float8_e8m0fnu; [] for one scale in all.
        convention: "multiply": a value is payload x scale; "divide": payload / scale.
        block: which values share a scale; rows are all axes but the last.
        logical_dtype: what the tensor says it is.
        source: class of the tensor.

    Raises:
        WrongShape: the number of scales does not fit the blocks.
    """

    payload: Any
    scale: Any
    convention: Convention
    block: Block
    logical_dtype: Any
    source: str

    def __post_init__(self) -> None:
        if tuple(self.scale.shape) != self.blocks:
            raise WrongShape(
                f"a {self.source} of shape {tuple(self.payload.shape)} with scales {self.block} needs {self.blocks} "
                f"scales, and has {tuple(self.scale.shape)}. Next step: pass the tensor itself to `read_payload`."
            )

    @property
    def format(self) -> Format:
        """The FP8 format of the payload."""
        return FORMATS[self.payload.dtype]

    @property
    def rows(self) -> int:
        """Number of rows when all axes but the last are one."""
        return int(self.payload.numel() // max(self.columns, 1))

    @property
    def columns(self) -> int:
        """Length of the last axis."""
        return int(self.payload.shape[-1]) if self.payload.dim() else 1

    @property
    def blocks(self) -> tuple[int, ...]:
        """The shape that the scales must have."""
        return () if self.block == "tensor" else blocks_of(self.block, self.rows, self.columns)

    def values(self, dtype: Any = None) -> Any:
        """The numbers, computed in fp32 and rounded once: [..., K]. This is a dequantization.

        Args:
            dtype: of the numbers; the logical one without it.
        """
        scale = self.scale.to(torch.float32)
        high, wide = SIZES[self.block]
        if high > 1:
            scale = scale.repeat_interleave(high, 0)[: self.rows]
        if wide > 1:
            scale = scale.repeat_interleave(wide, 1)[:, : self.columns]
        plain = self.payload.to(torch.float32).reshape(self.rows, self.columns)
        numbers = plain * scale if self.convention == "multiply" else plain / scale
        return numbers.reshape(self.payload.shape).to(dtype or self.logical_dtype)


# --- quantized tensor -------------------------------------------------------------------------------------------------


_saying: ContextVar[str] = ContextVar("megacpp_saying_dequantized", default="")


def saying() -> str:
    """The reason of the dequantization that runs now; empty outside of one."""
    return _saying.get()


def is_quantized(tensor: Any) -> bool:
    """Whether a tensor's storage is not what its dtype says."""
    return _vendor_kind(tensor) is not None


def read_payload(tensor: Any) -> ScaledPayload | Refusal:
    """Payload and scale of a tensor, or why they cannot be read. Copies and computes nothing.

    Raises:
        WrongDtype: the tensor is not quantized.
    """
    kind = _vendor_kind(tensor)
    if kind is None:
        raise WrongDtype(
            f"a {type(tensor).__name__} of {getattr(tensor, 'dtype', 'no dtype')} has no payload and no scale. Next "
            "step: quantize it, or use it unchanged."
        )
    reader = _READERS[kind]
    if reader is None:
        return Refusal("payload", "kind", f"nothing here reads a {type(tensor).__name__}")
    return reader(tensor)


def dequantize(tensor: Any, because: str) -> Any:
    """A quantized tensor as a plain one in its logical dtype; `saying()` returns the reason meanwhile.

    The result has the bits of Transformer Engine's own dequantization, which up to 2.18 fails for tensors with
    transposed bytes alone. It is nearer than torchao's own for training tensors, which divides in bf16 by a scale that
    was rounded to bf16 (off by 0.0056 on an H200 with 0.16, where one rounding is 0.0039). Tensors that this module
    cannot read are dequantized by their vendor.

    Args:
        tensor: a quantized tensor.
        because: the reason.

    Raises:
        WrongDtype: the tensor is not quantized.
    """
    found = read_payload(tensor)
    token = _saying.set(because)
    try:
        if isinstance(found, ScaledPayload):
            return found.values()
        # Every torch.Tensor has a `dequantize`, which knows nothing of torchao's training tensors.
        own = getattr(tensor, "to_original_precision", None) or tensor.dequantize
        return own().to(_logical_dtype(tensor))
    finally:
        _saying.reset(token)


# --- reading ----------------------------------------------------------------------------------------------------------

_Kind = tuple[str, str]  # top package and class


def _vendor_kind(tensor: Any) -> _Kind | None:
    """Which of the vendors' quantized tensors it is; None where it is none."""
    for kind in type(tensor).__mro__:
        found = kind.__module__.partition(".")[0], kind.__name__
        if found in _READERS:
            return found
    return None


def _payload(tensor: Any, payload: Any, scale: Any, block: Block, *, divides: bool = False) -> ScaledPayload:
    return ScaledPayload(
        payload, scale, "divide" if divides else "multiply", block, _logical_dtype(tensor), type(tensor).__name__
    )


def _logical_dtype(tensor: Any) -> Any:
    """What it says it is; Transformer Engine's bare storages say it from 2.13 on, and are read in fp32 before."""
    return getattr(tensor, "dtype", None) or getattr(tensor, "_dtype", torch.float32)


def _none(tensor: Any, why: str) -> Refusal:
    return Refusal("payload", "no-data", f"the {type(tensor).__name__} {why}")


def _as_fp8(data: Any, kind: Any) -> Any:
    """Bytes of Transformer Engine as the FP8 that its own enumeration names."""
    name = getattr(kind, "name", str(kind))
    return data.view(torch.float8_e5m2 if "E5M2" in name else torch.float8_e4m3fn)


def _read_te_tensor(tensor: Any) -> ScaledPayload | Refusal:
    """`Float8Tensor`: bytes [..., K] or, where only those are kept, transposed [K, ...]; one scale."""
    if tensor._data is not None:
        data = _as_fp8(tensor._data, tensor._fp8_dtype)
    elif tensor._transpose is not None and not tensor._transpose_invalid:
        data = _as_fp8(tensor._transpose, tensor._fp8_dtype).movedim(0, -1)
    else:
        return _none(tensor, "holds no data that is valid")
    return _payload(tensor, data, tensor._scale_inv.reshape(()), "tensor")


def _read_te_blocks(tensor: Any) -> ScaledPayload | Refusal:
    """`Float8BlockwiseQTensor`: scales of 1 x 128 lie transposed, and both kinds are padded to multiples of 4."""
    data, scale, turned = tensor._rowwise_data, tensor._rowwise_scale_inv, False
    if data is None:
        data, scale, turned = tensor._columnwise_data, tensor._columnwise_scale_inv, True
    if data is None or scale is None:
        return _none(tensor, "holds no data, or has lost its scales")
    columns = data.shape[-1] if not turned else data.numel() // max(data.shape[0], 1)  # of the bytes as they lie
    rows = data.numel() // max(columns, 1)
    if tensor._is_2D_scaled:
        scale, block = scale[: -(-rows // 128), : -(-columns // 128)], "128x128"
    else:
        scale, block = scale.t()[:rows, : -(-columns // 128)], "1x128"
    data = _as_fp8(data, tensor._fp8_dtype)
    if turned:
        data, scale, block = data.movedim(0, -1), scale.t(), "128x1" if block == "1x128" else block
    return _payload(tensor, data, scale, block)  # type: ignore[arg-type]


def _read_te_mxfp8(tensor: Any) -> ScaledPayload | Refusal:
    """`MXFP8Tensor`: exponents for 32 values each, padded to 128 x 4; neither kind is transposed."""
    if getattr(tensor, "_with_gemm_swizzled_scales", False):
        return Refusal("payload", "swizzled", "its scales lie in the order of one GEMM and of nobody else")
    data, scale, block = tensor._rowwise_data, tensor._rowwise_scale_inv, "1x32"
    if data is None:
        data, scale, block = tensor._columnwise_data, tensor._columnwise_scale_inv, "32x1"
    if data is None or scale is None:
        return _none(tensor, "holds no data, or has lost its scales")
    high, wide = SIZES[block]  # type: ignore[index]
    columns = data.shape[-1]
    rows = data.numel() // max(columns, 1)
    scale = scale.view(torch.float8_e8m0fnu)[: -(-rows // high), : -(-columns // wide)]
    return _payload(tensor, _as_fp8(data, tensor._fp8_dtype), scale, block)  # type: ignore[arg-type]


def _read_torchao(payload: str, scales: str, divides: bool, tensor: Any) -> ScaledPayload | Refusal:
    """The shape of the scales names their block: `_axiswise_dim` is not turned when a tensor is, up to 0.17."""
    data, scale = getattr(tensor, payload), getattr(tensor, scales)
    if scale.numel() == 1:
        return _payload(tensor, data, scale.reshape(()), "tensor", divides=divides)
    columns = data.shape[-1]
    rows = data.numel() // max(columns, 1)
    if scale.dim() == data.dim() and scale.shape[-1] in (1, columns):
        scale = scale.reshape(-1, scale.shape[-1])
    for block in SIZES:
        if block != "tensor" and tuple(scale.shape) == blocks_of(block, rows, columns):
            return _payload(tensor, data, scale, block, divides=divides)
    shapes = f"{tuple(scale.shape)} on {tuple(data.shape)}"
    return Refusal("payload", "scale-shape", f"its scales {shapes} belong to no block that is known here")


_Reader = Callable[[Any], ScaledPayload | Refusal]
_TE_READERS: Final[dict[str, _Reader | None]] = {
    "Float8Tensor": _read_te_tensor,
    "Float8BlockwiseQTensor": _read_te_blocks,
    "MXFP8Tensor": _read_te_mxfp8,
    "NVFP4Tensor": None,
    "QuantizedTensor": None,
}
# None: a quantized tensor that nothing here reads. Of torchao's others the base class is known, so that they are not
# taken for plain ones.
_READERS: Final[dict[_Kind, _Reader | None]] = {
    **{
        ("transformer_engine", f"{name}{suffix}"): reader
        for name, reader in _TE_READERS.items()
        for suffix in ("Storage", "Base", "")
    },
    ("torchao", "Float8TrainingTensor"): partial(_read_torchao, "_data", "_scale", True),
    ("torchao", "Float8Tensor"): partial(_read_torchao, "qdata", "scale", False),
    ("torchao", "TorchAOBaseTensor"): None,
}
