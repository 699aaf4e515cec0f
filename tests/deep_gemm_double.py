"""DeepGEMM's kernels in torch: what they assert, what they compute, and what they leave unwritten.

As `m_grouped_fp8_gemm_nt_contiguous` and `fp8_gemm_nt` of sgl-deep-gemm 0.1.3 on sm_90
(csrc/apis/gemm.hpp and layout.hpp): values along the sum lie side by side, scales of rows in any order, scales of
weights packed as they are or transposed. Sums are in fp64.
"""

from __future__ import annotations

from typing import Any

import torch

from megacpp_validate.bridge import deep_gemm
from megacpp_validate.bridge.vendor import Verdict

ALIGN = 128


def install(patch: Any, major: int = 9) -> None:
    """The library in torch, on a CPU that passes for one with its kernels; `patch` is pytest's monkeypatch."""
    patch.setattr(deep_gemm.DEEP_GEMM, "_verdict", Verdict(True, ""))
    for entry, function in (
        (deep_gemm.grouped_fp8_gemm, grouped),
        (deep_gemm.fp8_gemm, plain),
        (deep_gemm.rows_alignment, lambda: ALIGN),
    ):
        patch.setattr(entry, "_found", (function, ""))
    patch.setattr(deep_gemm, "_architecture", lambda device: major)


def grouped(a: Any, b: Any, out: Any, groups: Any, *, compiled_dims: str = "nk") -> None:
    """Tiles of 128 rows, each of one expert; rows of group -1 are skipped and keep what was there."""
    rows, weights = left(a), right(b)
    assert set(compiled_dims) <= set("mnk")
    assert out.shape == (rows.shape[0], weights.shape[1])
    assert out.dtype == torch.bfloat16
    assert out.is_contiguous()
    assert groups.shape == (rows.shape[0],)
    assert groups.dtype == torch.int32
    assert groups.is_contiguous()
    assert rows.shape[0] % ALIGN == 0
    out.fill_(float("nan"))
    for block in range(0, rows.shape[0], ALIGN):
        here = groups[block : block + ALIGN]
        assert len(set(here.tolist()) - {-1}) == 1, "one expert a block"
        assert here[0] >= 0, "the first row of a block says whether it is computed"
        real = here >= 0
        out[block : block + ALIGN][real] = (rows[block : block + ALIGN][real] @ weights[int(here[0])].T).bfloat16()


def plain(a: Any, b: Any, out: Any) -> None:
    """One product."""
    rows, weight = left(a), right((b[0][None], b[1][None]))[0]
    assert out.shape == (rows.shape[0], weight.shape[0])
    assert out.dtype == torch.bfloat16
    out.copy_((rows @ weight.T).bfloat16())


def left(given: Any) -> Any:
    """Values times scales for each 1 x 128, fp64."""
    values, scales = given
    assert values.dtype == torch.float8_e4m3fn
    assert scales.dtype == torch.float32
    assert values.stride(-1) == 1
    assert values.shape[-1] % 128 == 0
    assert scales.shape == (*values.shape[:-1], values.shape[-1] // 128)
    return values.double() * scales.double().repeat_interleave(128, -1)


def right(given: Any) -> Any:
    """Values times scales for each 128 x 128, fp64."""
    values, scales = given
    experts, outputs, inputs = values.shape
    assert values.dtype == torch.float8_e4m3fn
    assert scales.dtype == torch.float32
    assert values.is_contiguous()
    assert scales.shape == (experts, outputs // 128, inputs // 128)
    assert scales.is_contiguous() or scales.transpose(1, 2).is_contiguous()
    return values.double() * scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
