"""What makes a GPU give the same bits in every process, from the same seed.

On an H200 a step repeated in one process had the same bits, and two processes had not: Triton's autotuner measures how
long each configuration takes and keeps the fastest, so that each process sums in an order of its own. Transformer
Engine's backward pass of unpermute is such a kernel (`transformer_engine/common/triton/permutation.py`, 2.17.1 and
2.20.2: gradients of the router's probabilities are sums over blocks whose width is tuned).
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, Final

import torch

from ...jit.watch import after_import

# A workspace of cuBLAS for each stream (its documentation, "Results Reproducibility"), attention kernels of Transformer
# Engine that add in a fixed order, and no choice of an autotuner that another process left on disk.
VARIABLES: Final = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "TRITON_CACHE_AUTOTUNING": "0",
}


def keep_bits() -> None:
    """In this process nothing is chosen by its time, and sums have a fixed order where there is such a kernel.

    `VARIABLES` must have been set when the process began. A part of torch without such a kernel says so in a warning.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    after_import("triton.runtime.autotuner", _take_the_first)


def _take_the_first(module: Any) -> None:
    """Of the configurations that the kernel can run with, the autotuner takes the first, and not the fastest."""
    plain = module.Autotuner._bench
    if hasattr(plain, "__wrapped__"):
        return
    places = itertools.count(1)

    @functools.wraps(plain)
    def place_of(self: Any, *args: Any, **options: Any) -> list[float]:
        measured = plain(self, *args, **options)  # infinite: it does not fit the device
        median = measured[0] if isinstance(measured, list | tuple) else measured
        return [float(next(places)) if math.isfinite(median) else math.inf] * 3

    module.Autotuner._bench = place_of
