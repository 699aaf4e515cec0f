"""An FP8 tensor as a consumer takes it: payload and scale as one value, because either alone is no number.

Vendors differ in where a scale lies, how it is padded and transposed, and whether it multiplies or divides. Here it
lies as its blocks lie in the tensor, and says which of both it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from .errors import WrongDtype, WrongOption, WrongShape

Block = Literal["tensor", "row", "column", "1x128", "128x1", "128x128", "1x32", "32x1"]
Convention = Literal["multiply", "divide"]
Format = Literal["e4m3", "e5m2"]

FORMATS: Final[dict[Any, Format]] = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
# Rows and columns of a block; 0 for all there are.
SIZES: Final[dict[Block, tuple[int, int]]] = {
    "tensor": (0, 0), "row": (1, 0), "column": (0, 1), "1x128": (1, 128), "128x1": (128, 1), "128x128": (128, 128),
    "1x32": (1, 32), "32x1": (32, 1),
}  # fmt: skip


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
        WrongDtype: the payload is not in FP8.
        WrongOption: there is no scale.
        WrongShape: as many scales as the blocks want are not there.
    """

    payload: Any
    scale: Any
    convention: Convention
    block: Block
    logical_dtype: Any
    source: str

    def __post_init__(self) -> None:
        if self.payload.dtype not in FORMATS:
            raise WrongDtype(
                f"the payload of a {self.source} is {self.payload.dtype}. Likely cause: bytes that were not viewed as "
                f"FP8. Next step: view them as one of {', '.join(map(str, FORMATS))}."
            )
        if self.scale is None:
            raise WrongOption(
                f"the payload of a {self.source} came without its scale. Likely cause: it was taken out of its tensor "
                "by hand. Next step: hand the tensor itself to `hand_over`."
            )
        if tuple(self.scale.shape) != self.blocks:
            raise WrongShape(
                f"a {self.source} of shape {tuple(self.payload.shape)} with scales {self.block} wants "
                f"{self.blocks} of them, and has {tuple(self.scale.shape)}. Likely cause: scales of another tensor, or "
                "padding that was not cut off. Next step: hand the tensor itself to `hand_over`."
            )

    @property
    def format(self) -> Format:
        """Of the payload."""
        return FORMATS[self.payload.dtype]

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """What the tensor says it is."""
        return tuple(self.payload.shape)

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
        if self.block == "tensor":
            return ()
        high, wide = SIZES[self.block]
        return (-(-self.rows // high) if high else 1, -(-self.columns // wide) if wide else 1)

    def multiplier(self) -> Any:
        """fp32 scales by which a payload is multiplied, whatever the convention: what GEMMs take."""
        scale = self.scale.to(torch.float32)
        return scale if self.convention == "multiply" else scale.reciprocal()

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
