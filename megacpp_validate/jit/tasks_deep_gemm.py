"""DeepGEMM's kernels for an expert bank of a size of the smoke run, forward and both gradients; wants a GPU.

The calls are the bridge's own, so that kernels are those that a run asks for.
"""

from __future__ import annotations

import importlib
from typing import Any

from .order import JitOrder, Lacking

_ROOM = (__package__ or "megacpp_validate.jit").rpartition(".")[0]


def compile_task(order: JitOrder) -> None:
    """Settings: `size` of `training.sizes` (its experts, widths and tokens), or `experts`, `inputs`, `outputs`, `rows`.

    `shift`: how many rows the first expert has fewer, and the last more, where experts are not alike; half without it.

    Raises:
        Lacking: no GPU that DeepGEMM has kernels for, or no DeepGEMM.
    """
    import torch

    torch.manual_seed(order.seed)
    for experts, inputs, outputs, rows in banks(order):
        weight = torch.randn(experts, outputs, inputs, device=device(torch), dtype=torch.bfloat16, requires_grad=True)
        tokens = torch.randn(rows, inputs, device=weight.device, dtype=torch.bfloat16, requires_grad=True)
        product = importlib.import_module(f"{_ROOM}.bridge.deep_gemm_product")
        refusal = product.why_not_deep_gemm(weight.device, weight.dtype, inputs, outputs)
        if refusal is not None:
            raise Lacking(f"{refusal.backend}: {refusal.reason}")
        for counts in routings(experts, rows, int(order.setting("shift", "0"))):
            out = product.deep_gemm_grouped(tokens, weight, counts)
            out.backward(torch.randn_like(out))
    torch.cuda.synchronize()


def banks(order: JitOrder) -> list[tuple[int, int, int, int]]:
    """Experts, inputs K, outputs N and rows of each product of an expert layer."""
    if size := order.setting("size"):
        of = importlib.import_module(f"{_ROOM}.training.sizes").read_size(size)
        rows = of.batch * of.length * of.top_k
        return [
            (of.num_experts, of.hidden, 2 * of.expert_width, rows),
            (of.num_experts, of.expert_width, of.hidden, rows),
        ]
    wanted = ("experts", "inputs", "outputs", "rows")
    if lacking := [name for name in wanted if not order.setting(name)]:
        raise ValueError(f"settings lack {', '.join(lacking)}. Next step: name them, or a size.")
    experts, inputs, outputs, rows = (int(order.setting(name)) for name in wanted)
    return [(experts, inputs, outputs, rows)]


def device(torch: Any) -> str:
    """Where. Raises Lacking."""
    if not torch.cuda.is_available():
        raise Lacking("DeepGEMM reads the architecture from the device, and torch sees no CUDA device here")
    return "cuda"


def routings(experts: int, rows: int, shift: int = 0) -> list[list[int]]:
    """Rows of each expert: alike, which is one launch of the weight's gradient, and not, which is one an expert."""
    alike = [rows // experts] * experts
    uneven, moved = [*alike], shift or alike[0] // 2
    uneven[0], uneven[-1] = alike[0] - moved, alike[-1] + moved
    return [alike, uneven]
