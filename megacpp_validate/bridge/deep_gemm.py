"""The DeepGEMM import bridge: the same firewall for a third vendor library.

As in `imports.py`, importing this module imports nothing of the library and never raises. The library compiles its
kernels when they are first called, about 2 s each, so it wants a CUDA toolkit beside the driver: its own import starts
`which nvcc` where neither CUDA_HOME nor CUDA_PATH is set, and fails with an empty AssertionError where none is found.

What was seen with torch 2.11 on sm_90 (2026-11-21): sgl-deep-gemm 0.1.3 works; 0.1.7 and 0.2.0 load and then refuse
every tensor ("dim == 2 or dim == 3"); 0.2.1 and later do not load. In 0.1.3 there is no k-grouped FP8 kernel (only
`k_grouped_bf16_gemm_tn_contiguous`), the `nn` layouts are refused ("major_b == cute::UMMA::Major::K"), and with the
headers of CUDA 13.0 NVRTC compiles nothing: it is not told of include/cccl, and given that it lacks
`cudaGridDependencySynchronize`. So kernels are compiled by NVCC, and the gradient of the weights is made by the kernels
that there are (`deep_gemm_product`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from .vendor import Vendor, explain_plainly

NATIVE_PATH: Final = "a grouped matmul of plain torch in bf16"


DEEP_GEMM: Final = Vendor(
    "DeepGEMM",
    module="deep_gemm",
    switch="MEGACPP_DISABLE_DEEP_GEMM",
    trial="MEGACPP_DEEP_GEMM_TRIAL_SECONDS",
    explain=explain_plainly("DeepGEMM", "pip install sgl-deep-gemm==0.1.3, and set CUDA_HOME to a toolkit with nvcc"),
)

is_deep_gemm_available = DEEP_GEMM.is_available
why_deep_gemm_is_unavailable = DEEP_GEMM.why_unavailable


@DEEP_GEMM.entry(required=True)
def grouped_fp8_gemm() -> Any:
    """Rows [R, K] x weights [E, N, K]: each with its scales, the group of each row, into bf16 [R, N]."""
    from deep_gemm import m_grouped_fp8_gemm_nt_contiguous  # type: ignore[import-not-found, unused-ignore]

    return m_grouped_fp8_gemm_nt_contiguous


@DEEP_GEMM.entry(required=True)
def masked_fp8_gemm() -> Any:
    """Rows [E, M, K] x weights [E, N, K], of each expert as many rows as a count on the device says, into [E, M, N]."""
    from deep_gemm import fp8_m_grouped_gemm_nt_masked  # type: ignore[import-not-found, unused-ignore]

    return fp8_m_grouped_gemm_nt_masked


@DEEP_GEMM.entry(required=True)
def fp8_gemm() -> Any:
    """[M, K] x [N, K], each with its scales, into bf16 [M, N]."""
    from deep_gemm import fp8_gemm_nt  # type: ignore[import-not-found, unused-ignore]

    return fp8_gemm_nt


@DEEP_GEMM.entry(required=True)
def rows_alignment() -> Any:
    """The multiple to which each group's rows are padded; 128 on sm_90."""
    from deep_gemm import get_mk_alignment_for_contiguous_layout  # type: ignore[import-not-found, unused-ignore]

    return get_mk_alignment_for_contiguous_layout


class Compiler(NamedTuple):
    """What compiles the library's kernels when they are first called, and where they are kept.

    Attributes:
        mode: "nvcc" of the CUDA toolkit, or the driver-side "nvrtc".
        cache: the folder that holds `cache/kernel.NAME.HASH`; it is not locked, and kernels of both modes lie in it.
    """

    mode: Literal["nvcc", "nvrtc"]
    cache: Path


def compiler() -> Compiler:
    """What the library reads from the environment when it compiles its first kernel (csrc/jit/compiler.hpp, 0.1.3)."""
    asked = os.environ.get("DG_JIT_USE_NVRTC", "").strip()
    cache = os.environ.get("DG_JIT_CACHE_DIR", "")
    return Compiler("nvrtc" if asked.strip("0") else "nvcc", Path(cache) if cache else Path.home() / ".deep_gemm")
