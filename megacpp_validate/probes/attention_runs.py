"""By which of its kernels Transformer Engine's attention ran, and what a call of the wrapper leaves behind."""

from __future__ import annotations

import os
from typing import Any, Final

import torch

from .bench import Bench
from .observe import attention_kernels, graph_nodes

# Architectures on which every release from 2.12.0 to 2.20.2 has cuDNN's attention for what the wrapper hands on: half
# precision, head sizes 64 and 128, two tokens or more, causal or unmasked, no dropout (`get_attention_backend` in
# attention/dot_product_attention/utils.py). sm_121 is none: there kernels depend on the release of cuDNN. The double
# of Transformer Engine has no architecture, and chooses by the same rule. Where gradients must be deterministic, none
# is promised on sm_100: 2.8 to 2.11 turn cuDNN's off there (`deterministic` in that function), later releases do below
# cuDNN 9.18.1 (`nvte_get_fused_attn_backend` in common/fused_attn/fused_attn.cpp).
FUSED_ON: Final = ("sm_90", "sm_100", "")
HALF: Final = (torch.float16, torch.bfloat16)
SWITCHED_OFF: Final = "NVTE_FUSED_ATTN"
ANY_ORDER: Final = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


def check_kernel(bench: Bench, path: str, out: Any) -> None:
    """Where there is a fused kernel for a call, the unfused one is a fallback that nobody says.

    Either fused kernel will do, cuDNN's or FlashAttention's; which one it was stands in the receipt's row of the path.
    Where the graph shows neither name, nor torch's own softmax, nothing is known, and nothing fails.
    """
    kernels = attention_kernels(out)
    if not kernels and any("Softmax" in name for name in graph_nodes(out)):
        kernels = ("unfused",)
    said = f"Transformer Engine's attention ran by {', '.join(kernels) or 'a kernel that leaves no name'}"
    deterministic = os.environ.get(ANY_ORDER) == "0" or torch.are_deterministic_algorithms_enabled()
    no_fused = os.environ.get(SWITCHED_OFF) == "0" or (bench.order.target.arch == "sm_100" and deterministic)
    if bench.order.target.arch not in FUSED_ON or out.dtype not in HALF or no_fused:
        return bench.check(f"{path}.kernel.backend", True, f"{said}; none is expected of {out.dtype} here")
    wanted = f"a fused one is there for {out.dtype} on {bench.order.target.id}"
    return bench.check(f"{path}.kernel.backend", "unfused" not in kernels, f"{said}; {wanted}")


def check_attention_memory(bench: Bench, layer: Any, *, heads: int, groups: int, width: int, length: int) -> None:
    """A bf16 call, forward and backward, leaves nothing behind."""
    shapes = [(2, count, length, width) for count in (heads, groups, groups)]
    tensors = [torch.ones(shape, dtype=torch.bfloat16, device=bench.device) for shape in shapes]
    bench.layer_keeps_nothing("bf16", layer, *tensors)
