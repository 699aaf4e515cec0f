"""Liger Kernel as the second library behind the pattern: RMSNorm, SwiGLU, and the head's loss without its logits.

Importing this module imports nothing of the library and never raises.

What the sources of 0.8.5 do: RMSNorm writes the gradient of the rows over that of the output unless `in_place` is off,
and rounds normed rows before it multiplies the weight unless `casting_mode` is "gemma". The loss adds up the gradient
of the head in the dtype of the weight unless `accum_dtype` is given, and waits for the device once, to count targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch.nn import functional

from ..native.mlp import NormMLP
from ..native.norms import RMSNorm, without_autocast
from .backends import Candidate, Choice, Refusal, choose
from .vendor import Vendor, explain_plainly

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)

LIGER: Final = Vendor(
    "Liger Kernel",
    module="liger_kernel.transformers.functional",
    switch="MEGACPP_DISABLE_LIGER",
    explain=explain_plainly("Liger Kernel", "pip install liger-kernel==0.8.5"),
)


# Rows [..., D] and a weight [D] -> [..., D].
rms_norm: Final = LIGER.attribute("liger_rms_norm")
# The gate and the linear half, each [..., F] -> silu(gate) x linear [..., F].
swiglu: Final = LIGER.attribute("liger_swiglu")
# Rows [T, D], weight [V, D] and targets [T] -> loss []; gradients are made in the forward pass.
fused_linear_cross_entropy: Final = LIGER.attribute("liger_fused_linear_cross_entropy")


def why_not_liger(device: Any, dtype: Any) -> Refusal | None:
    """Why Liger cannot take tensors of that device and dtype; None where it can."""
    kind = torch.device(device).type
    if kind != "cuda":
        return Refusal("liger", "device", f"the tensors lie on {kind}, where Liger's Triton kernels do not run")
    if dtype not in DTYPES:
        return Refusal("liger", "dtype", f"the tensors are {dtype}, and Liger's kernels compute in fp32")
    if not LIGER.is_available():
        return Refusal("liger", "liger-unavailable", LIGER.why_unavailable())
    return None


def ask_liger(device: Any, dtype: Any, *, wanted: bool = True) -> Sequence[Candidate]:
    """Liger as the first candidate of a choice; no candidate where it is not wanted."""
    return [("liger", partial(why_not_liger, device, dtype))] if wanted else []


def choose_head_loss(*, dtype: Any, device: Any) -> Choice:
    """Which backend `linear_cross_entropy` takes for rows of that dtype and device, recorded: "liger" or "native"."""
    return choose("head_loss", [*ask_liger(device, dtype), ("native", lambda: None)])


def head_loss(rows: Any, weight: Any, targets: Any, *, ignore_index: int = -100, reduction: str = "mean") -> Any:
    """Cross-entropy of the logits `rows @ weight.T` in plain torch; arguments and result as in `linear_cross_entropy`.

    The logits [T, V] lie in memory, rounded to the dtype of the rows and again in fp32.
    """
    with without_autocast(rows):
        logits = functional.linear(rows, weight)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return functional.cross_entropy(wide, targets, ignore_index=ignore_index, reduction=reduction)


def linear_cross_entropy(
    rows: Any, weight: Any, targets: Any, *, ignore_index: int = -100, reduction: str = "mean"
) -> Any:
    """The loss of a linear head: by Liger, which keeps no logits, else by `head_loss`.

    Liger makes gradients in the forward pass, so a second backward pass of its loss gives wrong ones.

    Args:
        rows: [T, D].
        weight: [V, D] in the same dtype.
        targets: int64 [T], 0 to V - 1 or `ignore_index`.
        ignore_index: target of the rows that are left out.
        reduction: "mean" over the rows that are not left out, or "sum".

    Returns:
        [] in fp32 at least, also inside an autocast region. The mean over no row is NaN.
    """
    if why_not_liger(rows.device, rows.dtype) is not None:
        return head_loss(rows, weight, targets, ignore_index=ignore_index, reduction=reduction)
    with without_autocast(rows):
        return fused_linear_cross_entropy.require()(
            rows, weight, targets, ignore_index=ignore_index, reduction=reduction, accum_dtype=torch.float32
        )


def _norm(rows: Any, weight: Any, eps: float) -> Any:
    return rms_norm.require()(rows, weight, eps, casting_mode="gemma", in_place=False)


class LigerNorm(RMSNorm):
    """`native.norms.RMSNorm` by Liger's kernel; the same parameter."""

    def forward(self, x: Any) -> Any:
        """[..., hidden] -> the same shape and dtype."""
        return _norm(x, self.weight, self.eps)


class LigerNormMLP(NormMLP):
    """`native.mlp.NormMLP` with norm and SwiGLU by Liger's kernels, the products by torch; the same parameters."""

    def forward(self, x: Any) -> Any:
        """[..., hidden] -> [..., hidden]."""
        up = functional.linear(_norm(x, self.layer_norm_weight, self.eps), self.fc1_weight)
        return functional.linear(swiglu.require()(*up.chunk(2, dim=-1)), self.fc2_weight)
