"""`Fp8Padding` and `Fp8Unpadding`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .gemm import Mark


class _Fp8Padding(Mark):
    """The name that the graph shows."""


class _Fp8Unpadding(Mark):
    """The name that the graph shows."""


class _Padder(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or 16

    def padded(self, m_splits: Sequence[int]) -> list[int]:
        """Numbers of rows, each a multiple of `align_size`."""
        if len(m_splits) != self.num_gemms:
            raise AssertionError("Number of splits should match number of GEMMs.")
        return [-(-size // self.align_size) * self.align_size for size in m_splits]


class Fp8Padding(_Padder):
    """Pads each group of rows to a multiple of `align_size`."""

    def forward(self, inp: Any, m_splits: Sequence[int]) -> tuple[Any, list[int]]:
        """Rows [R, D] -> rows [R', D] and their numbers."""
        padded = self.padded(m_splits)
        if padded == list(m_splits):
            return inp, padded
        parts = [
            torch.nn.functional.pad(part, (0, 0, 0, wide - part.shape[0]))
            for part, wide in zip(inp.split(list(m_splits)), padded, strict=True)
        ]
        return _Fp8Padding.apply(torch.cat(parts)), padded


class Fp8Unpadding(_Padder):
    """Takes those rows out again; `m_splits` are the numbers without padding."""

    def forward(self, inp: Any, m_splits: Sequence[int]) -> Any:
        """Rows [R', D] -> rows [R, D]."""
        padded = self.padded(m_splits)
        if padded == list(m_splits):
            return inp
        parts = [part[:size] for part, size in zip(inp.split(padded), m_splits, strict=True)]
        return _Fp8Unpadding.apply(torch.cat(parts))
