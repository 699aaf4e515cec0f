"""Wrapper-aware dispatch: a tensor that says bf16 and stores FP8 hands over payload and scale together.

Code that does not know such a tensor reads it in bf16, and nobody sees that FP8 was paid for and thrown away. So what a
consumer cannot take is dequantized here alone, and says because of what; all of it is in `recorded_choices()`.

Tensors are known by their class and where it comes from, not by import: Transformer Engine's `Float8Tensor`,
`Float8BlockwiseQTensor` and `MXFP8Tensor` (2.1 to 2.20), torchao's `Float8TrainingTensor` of training (0.13 and later;
`Float8Tensor` in `torchao.float8` before) and `Float8Tensor` of inference. Their scales multiply but for torchao's of
training, which divide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch

from .backends import Refusal, choose
from .errors import WrongDtype, WrongOption
from .scaled_payload import SIZES, Block, Format, ScaledPayload

__all__ = [
    "Accepts",
    "Dequantized",
    "ScaledPayload",
    "dequantize",
    "hand_over",
    "is_quantized",
    "read_payload",
    "saying",
]

MODULE: Final = "quantized_tensor"


@dataclass(frozen=True)
class Accepts:
    """What a consumer takes as it is.

    Attributes:
        consumer: who it is, as "torch._scaled_mm".
        blocks: scales that it takes.
        formats: of the payload.
    """

    consumer: str
    blocks: frozenset[Block]
    formats: frozenset[Format] = frozenset({"e4m3"})

    def why_not(self, payload: ScaledPayload) -> Refusal | None:
        """Why the consumer cannot take this payload; None where it can."""
        if payload.block not in self.blocks:
            taken = ", ".join(sorted(self.blocks))
            return Refusal("payload", "block", f"its scales are {payload.block}; {self.consumer} takes {taken}")
        if payload.format not in self.formats:
            taken = ", ".join(sorted(self.formats))
            return Refusal("payload", "format", f"it is {payload.format}; {self.consumer} takes {taken}")
        return None


@dataclass(frozen=True, eq=False)
class Dequantized:
    """What was read in its logical dtype because no consumer could take the payload.

    Attributes:
        values: plain tensor in the logical dtype.
        because: why, for a person.
        source: class of the tensor.
    """

    values: Any
    because: str
    source: str


_saying: ContextVar[str] = ContextVar("megacpp_saying_dequantized", default="")


def saying() -> str:
    """Because of what the dequantization that runs now was announced; empty outside of one."""
    return _saying.get()


def is_quantized(tensor: Any) -> bool:
    """Whether a tensor's storage is not what its dtype says."""
    return _vendor_kind(tensor) is not None


def read_payload(tensor: Any) -> ScaledPayload | Refusal:
    """Payload and scale of a tensor, or why there are none that belong together. Nothing is copied or computed.

    Raises:
        WrongDtype: it is no quantized tensor.
    """
    kind = _vendor_kind(tensor)
    if kind is None:
        raise WrongDtype(
            f"a {type(tensor).__name__} of {getattr(tensor, 'dtype', 'no dtype')} has no payload and no scale. Likely "
            "cause: it was dequantized before, or never quantized. Next step: quantize it, or pass it on as it is."
        )
    reader = _READERS.get(kind)
    if reader is None:
        return Refusal("payload", "kind", f"nothing here reads a {type(tensor).__name__}")
    return reader(tensor)


def hand_over(tensor: Any, accepts: Accepts) -> ScaledPayload | Dequantized:
    """A quantized tensor for a consumer: payload and scale together, or dequantized and said because of what.

    Args:
        tensor: a quantized tensor of Transformer Engine or torchao, any shape [..., K].
        accepts: what the consumer takes.

    Raises:
        WrongDtype: it is no quantized tensor.
    """
    found = read_payload(tensor)
    refusal = found if isinstance(found, Refusal) else accepts.why_not(found)
    choose(MODULE, (("payload", lambda: refusal), ("dequantized", lambda: None)))
    if refusal is None and isinstance(found, ScaledPayload):
        return found
    return dequantize(tensor, refusal.reason if refusal is not None else "it has no payload")


def dequantize(tensor: Any, because: str) -> Dequantized:
    """A quantized tensor in its logical dtype, announced; by its own vendor where nothing here can read it.

    The same bits as Transformer Engine's own way, which does not know all of its storages (turned bytes alone, up to
    2.18), and nearer than that of torchao's training tensors: those divide in bf16 by a scale that was rounded to bf16
    (off by 0.0056 on an H200 with 0.16, where one rounding is 0.0039).

    Args:
        tensor: a quantized tensor.
        because: why that is wanted.

    Raises:
        WrongOption: no reason was given.
        WrongDtype: it is no quantized tensor.
    """
    if not because.strip():
        raise WrongOption(
            "a dequantization without a reason is a silent one. Next step: say because of what it is wanted."
        )
    found = read_payload(tensor)
    with _announced(because):
        if isinstance(found, ScaledPayload):
            values = found.values()
        else:  # every torch.Tensor has a `dequantize`, which knows nothing of torchao's training tensors
            own = getattr(tensor, "to_original_precision", None) or tensor.dequantize
            values = own().to(_logical_dtype(tensor))
    return Dequantized(values, f"dequantized because {because}", type(tensor).__name__)


@contextmanager
def _announced(because: str) -> Iterator[None]:
    token = _saying.set(because)
    try:
        yield
    finally:
        _saying.reset(token)


# --- reading ----------------------------------------------------------------------------------------------------------

_Kind = tuple[str, str]  # top package and class


def _vendor_kind(tensor: Any) -> _Kind | None:
    """Which of the vendors' quantized tensors it is; None where it is none."""
    for kind in type(tensor).__mro__:
        package = kind.__module__.partition(".")[0]
        if package == "transformer_engine" and kind.__name__ in _TE_STORAGES:
            return package, kind.__name__
        if package == "torchao" and kind.__name__ in _TORCHAO:
            training = kind.__module__.startswith("torchao.float8.")
            return "torchao.float8" if training else package, kind.__name__
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
    scale = tensor._scale_inv
    if scale is None:
        return _none(tensor, "has lost its scale")
    if tensor._data is not None:
        data = _as_fp8(tensor._data, tensor._fp8_dtype)
    elif tensor._transpose is not None and not tensor._transpose_invalid:
        data = _as_fp8(tensor._transpose, tensor._fp8_dtype).movedim(0, -1)
    else:
        return _none(tensor, "holds no data that is valid")
    if scale.numel() != 1:
        return _none(tensor, f"has {scale.numel()} scales where one is wanted")
    return _payload(tensor, data, scale.reshape(()), "tensor")


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


def _read_torchao_training(tensor: Any) -> ScaledPayload | Refusal:
    """Scales that divide. Their shape is asked: `_axiswise_dim` is not turned when a tensor is, up to 0.17."""
    data, scale = tensor._data, tensor._scale
    if scale is None:
        return _none(tensor, "has lost its scale")
    if scale.numel() == 1:
        return _payload(tensor, data, scale.reshape(()), "tensor", divides=True)
    return _by_shape(tensor, data, scale, divides=True)


def _read_torchao_inference(tensor: Any) -> ScaledPayload | Refusal:
    """Scales that multiply, one a block of `block_size`."""
    if tensor.scale is None:
        return _none(tensor, "has lost its scale")
    if tensor.scale.numel() == 1:
        return _payload(tensor, tensor.qdata, tensor.scale.reshape(()), "tensor")
    return _by_shape(tensor, tensor.qdata, tensor.scale, divides=False)


def _by_shape(tensor: Any, data: Any, scale: Any, *, divides: bool) -> ScaledPayload | Refusal:
    """The block that the shape of the scales says."""
    columns = data.shape[-1]
    rows = data.numel() // max(columns, 1)
    if scale.dim() == data.dim() and scale.shape[-1] in (1, columns):
        scale = scale.reshape(-1, scale.shape[-1])
    for block, (high, wide) in SIZES.items():
        wanted = (-(-rows // high) if high else 1, -(-columns // wide) if wide else 1)
        if block != "tensor" and tuple(scale.shape) == wanted:
            return _payload(tensor, data, scale, block, divides=divides)
    shapes = f"{tuple(scale.shape)} on {tuple(data.shape)}"
    return Refusal("payload", "scale-shape", f"its scales {shapes} belong to no block that is known here")


_TE_STORAGES: Final = frozenset(
    f"{name}{suffix}"
    for name in ("Float8Tensor", "Float8BlockwiseQTensor", "MXFP8Tensor", "NVFP4Tensor", "QuantizedTensor")
    for suffix in ("Storage", "Base", "")
)
# Of other quantized tensors of torchao the base class is known, so that they are not taken for plain ones.
_TORCHAO: Final = frozenset({"Float8TrainingTensor", "Float8Tensor", "TorchAOBaseTensor"})
_READERS: Final[dict[_Kind, Callable[[Any], ScaledPayload | Refusal]]] = {
    **{("transformer_engine", f"Float8Tensor{suffix}"): _read_te_tensor for suffix in ("", "Storage", "Base")},
    **{("transformer_engine", f"Float8BlockwiseQTensor{end}"): _read_te_blocks for end in ("", "Storage", "Base")},
    **{("transformer_engine", f"MXFP8Tensor{suffix}"): _read_te_mxfp8 for suffix in ("", "Storage", "Base")},
    ("torchao.float8", "Float8TrainingTensor"): _read_torchao_training,
    ("torchao.float8", "Float8Tensor"): _read_torchao_training,
    ("torchao", "Float8Tensor"): _read_torchao_inference,
}
