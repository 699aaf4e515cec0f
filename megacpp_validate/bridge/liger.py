"""The Liger Kernel import bridge: the same firewall for a second vendor library.

For a training tree that fuses the loss of its head with the projection: it asks `is_liger_available` first, and takes
torch's where that says no, for nothing here falls back by itself. As in `imports.py`, importing this module imports
nothing of the library and never raises.
"""

from __future__ import annotations

from typing import Any, Final

from .vendor import Vendor, explain_plainly

NATIVE_PATH = "torch.nn.functional.cross_entropy of a projection"

LIGER: Final = Vendor(
    "Liger Kernel",
    module="liger_kernel.transformers",
    switch="MEGACPP_DISABLE_LIGER",
    trial="MEGACPP_LIGER_TRIAL_SECONDS",
    explain=explain_plainly("Liger Kernel", "pip install liger-kernel"),
)

is_liger_available = LIGER.is_available
why_liger_is_unavailable = LIGER.why_unavailable
is_liger_enabled_for = LIGER.is_enabled_for


@LIGER.entry(required=True)
def fused_linear_cross_entropy() -> Any:
    """Projection and cross entropy as one: weight [V, D], rows [T, D], targets [T] -> loss []."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss


def liger_head_loss(weight: Any, rows: Any, targets: Any, *, ignore_index: int = -100) -> Any:
    """Cross entropy of `rows @ weight.T`: weight [V, D], rows [T, D], targets [T] int64 -> loss [].

    Raises:
        VendorEntryMissing: Liger cannot be used here; the text says why.
    """
    loss = fused_linear_cross_entropy.require()(ignore_index=ignore_index, reduction="mean")
    return loss(weight, rows, targets)
