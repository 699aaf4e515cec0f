"""Cross-entropy of a linear head in chunks of rows: the logits of all rows never lie in memory at once.

Each chunk makes its gradients as soon as it has its loss, so the backward pass only scales them. Sources: Wijmans et
al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", arXiv:2411.09009; Hsu et al. 2024, "Liger Kernel",
arXiv:2410.10989, whose fused loss has the same structure.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .norms import without_autocast

CHUNK: Final = 256  # rows whose logits lie in memory at once


def head_loss(rows: Any, weight: Any, targets: Any, *, ignore_index: int = -100, reduction: str = "mean") -> Any:
    """Cross-entropy of the logits `rows @ weight.T`, as `torch.nn.functional.cross_entropy` defines it.

    Args:
        rows: [T, D].
        weight: [V, D] in the same dtype.
        targets: int64 [T], 0 to V - 1 or `ignore_index`.
        ignore_index: target of the rows that are left out.
        reduction: "mean" over the rows that are not left out, or "sum".

    Returns:
        [] in fp32 at least, also inside an autocast region; logits are rounded to the dtype of the rows, as the plain
        product rounds them. The mean over no row is NaN.
    """
    with without_autocast(rows):
        total = _HeadLoss.apply(rows, weight, targets, ignore_index)
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


class _HeadLoss(torch.autograd.Function):
    """The sum over rows; gradients of rows and weight are made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any, targets: Any, ignore_index: int) -> Any:
        wide = torch.promote_types(rows.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=rows.device)
        of_rows, of_weight = torch.empty_like(rows), torch.zeros_like(weight, dtype=wide)
        for start in range(0, rows.shape[0], CHUNK):
            chunk, target = rows[start : start + CHUNK], targets[start : start + CHUNK]
            logits = (chunk @ weight.t()).to(wide)
            total += functional.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")
            if not any(ctx.needs_input_grad):
                continue
            kept = (target != ignore_index).unsqueeze(1)
            of_logits = logits.softmax(dim=1)
            of_logits.scatter_add_(1, target.unsqueeze(1) * kept, torch.full_like(logits[:, :1], -1.0))
            of_logits = (of_logits * kept).to(rows.dtype)
            of_rows[start : start + CHUNK] = of_logits @ weight
            of_weight += of_logits.t() @ chunk
        ctx.save_for_backward(of_rows, of_weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, Any, None, None]:
        of_rows, of_weight = ctx.saved_tensors
        return (of_rows * gradient).to(of_rows.dtype), (of_weight * gradient).to(ctx.dtype), None, None
