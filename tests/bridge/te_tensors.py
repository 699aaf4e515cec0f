"""Tensors as Transformer Engine stores them, with its own way to dequantize written out block by block.

Layouts are those of 2.12.0 and 2.20.2: `pytorch/tensor/storage/*.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

FORMATS = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}


class Wrapped(torch.Tensor):
    """A wrapper that says bf16, and dequantizes for whoever does not know it."""

    @staticmethod
    def __new__(cls, shape: Any, **parts: Any) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16)
        for name, value in parts.items():
            setattr(made, name, value)
        return made

    def __init__(self, shape: Any, **parts: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        plain = [one.dequantize() if isinstance(one, Wrapped) else one for one in args]
        return func(*plain, **(kwargs or {}))

    def clone(self) -> Any:
        return type(self)(self.shape, **{key: _copied(value) for key, value in vars(self).items()})

    def _fp8(self, data: Any) -> Any:
        return data.view(FORMATS[self._fp8_dtype.name])

    def __repr__(self) -> str:
        return type(self).__name__


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


class Float8Tensor(Wrapped):
    """What only moves bytes about keeps them, and the scale; see `moved`, which faults are planted in."""

    def view(self, *shape: int) -> Any:
        return self.moved(self._data.view(*shape))

    def reshape(self, *shape: int) -> Any:
        return self.moved(self._data.reshape(*shape))

    def clone(self) -> Any:
        return self.moved(self._data.clone())

    def moved(self, data: Any) -> Any:
        parts = {"_scale_inv": self._scale_inv, "_transpose": None, "_transpose_invalid": True}
        return Float8Tensor(data.shape, _data=data, _fp8_dtype=self._fp8_dtype, **parts)

    def mul_(self, factor: float) -> Any:
        self._scale_inv = self._scale_inv * factor
        return self

    def copy_(self, other: Any) -> Any:
        self._data.copy_(other._data)
        self.take_scale(other)
        return self

    def take_scale(self, other: Any) -> None:
        self._scale_inv = other._scale_inv

    def _set_data(self, other: Any) -> None:
        self._data = other._data
        self.take_scale(other)

    data = property(lambda self: self, _set_data)

    def __reduce_ex__(self, _: Any) -> Any:
        return _loaded, (self._data, self._fp8_dtype, self._scale_inv)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.view.default, aten.slice.Tensor, aten.select.int):
            return args[0].moved(func(args[0]._data, *args[1:]))
        if func is aten.detach.default and args[0]._data is not None:
            return args[0].moved(args[0]._data)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def dequantize(self, *, dtype: Any = torch.bfloat16) -> Any:
        if self._data is None:
            raise NotImplementedError("Casting back from the transpose not implemented yet!")
        return (self._fp8(self._data).float() * self._scale_inv).to(dtype)


def _loaded(data: Any, kind: Any, scale: Any) -> Any:
    parts = {"_scale_inv": scale, "_transpose": None, "_transpose_invalid": True}
    return Float8Tensor(data.shape, _data=data, _fp8_dtype=kind, **parts)


class Float8BlockwiseQTensor(Wrapped):
    def view(self, *shape: int) -> Any:
        if shape[-1] != self.shape[-1] or (self._is_2D_scaled and shape[-2] != self.shape[-2]):
            raise RuntimeError("does not support view the last dimension")
        return type(self)(shape, **{**vars(self), "_rowwise_data": self._rowwise_data.view(shape)})

    def dequantize(self, *, dtype: Any = torch.bfloat16) -> Any:
        turned = self._rowwise_data is None
        data = self._columnwise_data if turned else self._rowwise_data
        scale = self._columnwise_scale_inv if turned else self._rowwise_scale_inv
        out = self._fp8(data).float().reshape(-1, data.shape[-1])
        for row in range(out.shape[0]):
            for block in range(-(-out.shape[1] // 128)):
                one = scale[row // 128, block] if self._is_2D_scaled else scale[block, row]
                out[row, block * 128 : block * 128 + 128] *= one
        return (out.t() if turned else out.view(data.shape)).to(dtype)


class MXFP8Tensor(Wrapped):
    def dequantize(self, *, dtype: Any = torch.bfloat16) -> Any:
        by_row = self._rowwise_data is not None
        data = self._rowwise_data if by_row else self._columnwise_data
        scale = self._rowwise_scale_inv if by_row else self._columnwise_scale_inv
        out = self._fp8(data).float()
        for row in range(out.shape[0]):
            for column in range(out.shape[1]):
                at = (row, column // 32) if by_row else (row // 32, column)
                out[row, column] *= 2.0 ** (int(scale[at]) - 127)
        return out.to(dtype)


class NVFP4Tensor(Wrapped):
    def dequantize(self, *, dtype: Any = torch.bfloat16) -> Any:
        return torch.ones(self.shape, dtype=dtype)


for _kind in (Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor, NVFP4Tensor):
    _kind.__module__ = "transformer_engine.pytorch.tensor"


def _bytes(*shape: int, seed: int = 0, dtype: Any = torch.float8_e4m3fn) -> Any:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 20
    return values.to(dtype).view(torch.uint8)


def _scales(*shape: int, seed: int = 1) -> Any:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 3 + 0.1


def _format(name: str = "kFloat8E4M3") -> Any:
    return SimpleNamespace(name=name)


def one_scale(rows: int = 48, columns: int = 32, *, turned: bool = False, gradient: bool = False) -> Any:
    name = "kFloat8E5M2" if gradient else "kFloat8E4M3"
    data = _bytes(rows, columns, dtype=FORMATS[name])
    parts = {"_data": None if turned else data, "_transpose": data.t().contiguous() if turned else None}
    return Float8Tensor(
        (rows, columns), _scale_inv=_scales(1), _transpose_invalid=not turned, _fp8_dtype=_format(name), **parts
    )


def _parts(turned: bool, data: Any, scale: Any) -> dict[str, Any]:
    """Data and scales of one of both directions; the other has none."""
    parts = dict.fromkeys(("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"))
    kind = "columnwise" if turned else "rowwise"
    return {**parts, f"_{kind}_data": data, f"_{kind}_scale_inv": scale}


def blocks(rows: int, columns: int, *, square: bool, turned: bool = False) -> Any:
    """Scales of 1 x 128 lie [blocks along K, rows padded to 4], of 128 x 128 [blocks of rows, blocks of K padded]."""
    high, wide = (columns, rows) if turned else (rows, columns)
    along = -(-wide // 128)
    shape = (-(-high // 128), -(-along // 4) * 4) if square else (along, -(-high // 4) * 4)
    parts = _parts(turned, _bytes(high, wide), _scales(*shape))
    return Float8BlockwiseQTensor((rows, columns), _is_2D_scaled=square, _fp8_dtype=_format(), **parts)


def exponents(rows: int = 48, columns: int = 96, *, turned: bool = False, swizzled: bool = False) -> Any:
    """Scales padded to 128 x 4, or 4 x 128 where they run down the columns."""
    wide = (-(-rows // 32), columns) if turned else (rows, -(-columns // 32))
    pads = (4, 128) if turned else (128, 4)
    shape = tuple(-(-size // pad) * pad for size, pad in zip(wide, pads, strict=True))
    scale = torch.randint(122, 130, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    parts = _parts(turned, _bytes(rows, columns), scale)
    return MXFP8Tensor((rows, columns), _with_gemm_swizzled_scales=swizzled, _fp8_dtype=_format(), **parts)
