"""The TE import bridge: the only module that names a symbol of Transformer Engine.

Every entry point that the bridge uses has one accessor here. Calling it gives the symbol, or None where this
process cannot use it; `accessor.require()` raises with the reason instead, `accessor.why_missing()` tells it.
Importing this module imports nothing of Transformer Engine and never raises, whatever is wrong with the install.

The canary reads the accessors' import statements as the surface that the bridge consumes, so they are written as
plain imports: `try: new place; except ImportError: old place` where a release moved something.
"""

from __future__ import annotations

from typing import Any, Final

from .vendor import Vendor, VendorEntryMissing, explain_plainly, look_for_te

__all__ = [
    "TE",
    "VendorEntryMissing",
    "is_te_available",
    "is_te_enabled_for",
    "te_import_failure",
    "why_te_is_unavailable",
]

TE: Final = Vendor(
    "Transformer Engine",
    module="transformer_engine.pytorch",
    switch="MEGACPP_DISABLE_TE",
    explain=explain_plainly(
        "Transformer Engine",
        "run `megacpp-validate doctor`, which names the likely cause",
        lambda: look_for_te().describe(),
        "transformer_engine",
    ),
)

is_te_available = TE.is_available
why_te_is_unavailable = TE.why_unavailable
is_te_enabled_for = TE.is_enabled_for
why_te_is_disabled_for = TE.why_disabled_for


def te_import_failure() -> dict[str, Any] | None:
    """What a failed import raised, and what of Transformer Engine is on the path, as a JSON object.

    Returns:
        None where no import failed: Transformer Engine can be used, is turned off, or ended a trial process.
    """
    if TE.is_available() or TE.failure is None:
        return None
    return {**TE.failure, "install": look_for_te()._asdict()}


# --- layers -----------------------------------------------------------------------------------------------


@TE.required_entry
def linear() -> Any:
    """`te.Linear`: [..., in_features] -> [..., out_features]."""
    from transformer_engine.pytorch import Linear

    return Linear


@TE.entry
def layernorm_linear() -> Any:
    """`te.LayerNormLinear`: LayerNorm or RMSNorm, then a linear layer, as one operation."""
    from transformer_engine.pytorch import LayerNormLinear

    return LayerNormLinear


@TE.entry
def layernorm_mlp() -> Any:
    """`te.LayerNormMLP`: norm, linear, activation (gated or plain), linear."""
    from transformer_engine.pytorch import LayerNormMLP

    return LayerNormMLP


@TE.entry
def grouped_linear() -> Any:
    """`te.GroupedLinear`: one linear layer an expert, over rows split by `m_splits`."""
    from transformer_engine.pytorch import GroupedLinear

    return GroupedLinear


@TE.entry
def dot_product_attention() -> Any:
    """`te.DotProductAttention`."""
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention


@TE.entry
def transformer_layer() -> Any:
    """`te.TransformerLayer`: attention and MLP with their norms and residuals."""
    from transformer_engine.pytorch import TransformerLayer

    return TransformerLayer


@TE.entry
def rmsnorm() -> Any:
    """`te.RMSNorm`."""
    from transformer_engine.pytorch import RMSNorm

    return RMSNorm


# --- MoE dispatch -----------------------------------------------------------------------------------------


@TE.entry
def moe_permute_with_probs() -> Any:
    """Tokens [T, D] and probabilities [T, E] sorted by expert."""
    from transformer_engine.pytorch import moe_permute_with_probs

    return moe_permute_with_probs


@TE.entry
def moe_unpermute() -> Any:
    """The inverse of a permute, merging with probabilities [T, E]."""
    from transformer_engine.pytorch import moe_unpermute

    return moe_unpermute


@TE.entry
def moe_sort_chunks_by_index() -> Any:
    """Chunks of rows put into another order."""
    from transformer_engine.pytorch import moe_sort_chunks_by_index

    return moe_sort_chunks_by_index


@TE.entry
def moe_sort_chunks_by_index_with_probs() -> Any:
    """Chunks of rows and their probabilities put into another order."""
    from transformer_engine.pytorch import moe_sort_chunks_by_index_with_probs

    return moe_sort_chunks_by_index_with_probs


@TE.entry
def fp8_padding() -> Any:
    """`te.Fp8Padding`: pads each expert's rows to what an FP8 GEMM takes."""
    from transformer_engine.pytorch import Fp8Padding

    return Fp8Padding


@TE.entry
def fp8_unpadding() -> Any:
    """`te.Fp8Unpadding`: takes those rows out again."""
    from transformer_engine.pytorch import Fp8Unpadding

    return Fp8Unpadding


# --- FP8: scope, recipes, state ---------------------------------------------------------------------------


@TE.entry
def autocast() -> Any:
    """The low-precision scope by its name since 2.9: `autocast(recipe=)`."""
    from transformer_engine.pytorch import autocast

    return autocast


@TE.entry
def fp8_autocast() -> Any:
    """The low-precision scope by its name before 2.9: `fp8_autocast(fp8_recipe=)`."""
    from transformer_engine.pytorch import fp8_autocast

    return fp8_autocast


@TE.entry
def fp8_format() -> Any:
    """The enumeration of FP8 formats: E4M3, E5M2, HYBRID."""
    from transformer_engine.common.recipe import Format

    return Format


@TE.required_entry
def delayed_scaling() -> Any:
    """Recipe: scales from a history of amax values."""
    from transformer_engine.common.recipe import DelayedScaling

    return DelayedScaling


@TE.entry
def float8_current_scaling() -> Any:
    """Recipe: scales from the tensor at hand (since 2.2)."""
    from transformer_engine.common.recipe import Float8CurrentScaling

    return Float8CurrentScaling


@TE.entry
def float8_block_scaling() -> Any:
    """Recipe: one scale a block of 128 values or 128 x 128 (since 2.3)."""
    from transformer_engine.common.recipe import Float8BlockScaling

    return Float8BlockScaling


@TE.entry
def mxfp8_block_scaling() -> Any:
    """Recipe: one scale a block of 32 values; compute capability 10.0 and above (since 2.1)."""
    from transformer_engine.common.recipe import MXFP8BlockScaling

    return MXFP8BlockScaling


@TE.entry
def nvfp4_block_scaling() -> Any:
    """Recipe: 4-bit values, one scale a block of 16; Blackwell (since 2.8)."""
    from transformer_engine.common.recipe import NVFP4BlockScaling

    return NVFP4BlockScaling


@TE.entry
def fp8_state_manager() -> Any:
    """`FP8GlobalStateManager`: what recipe is on, with which reduction group."""
    try:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    except ImportError:
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    return FP8GlobalStateManager


@TE.entry
def check_fp8_support() -> Any:
    """Whether this device has FP8, as (bool, reason)."""
    try:
        from transformer_engine.pytorch.quantization import check_fp8_support
    except ImportError:
        from transformer_engine.pytorch.fp8 import check_fp8_support

    return check_fp8_support


@TE.entry
def check_mxfp8_support() -> Any:
    """Whether this device has MXFP8, as (bool, reason) (since 2.1)."""
    try:
        from transformer_engine.pytorch.quantization import check_mxfp8_support
    except ImportError:
        from transformer_engine.pytorch.fp8 import check_mxfp8_support

    return check_mxfp8_support


@TE.entry
def check_fp8_block_scaling_support() -> Any:
    """Whether this device has FP8 block scaling, as (bool, reason) (since 2.3)."""
    try:
        from transformer_engine.pytorch.quantization import check_fp8_block_scaling_support
    except ImportError:
        from transformer_engine.pytorch.fp8 import check_fp8_block_scaling_support

    return check_fp8_block_scaling_support


@TE.entry
def check_nvfp4_support() -> Any:
    """Whether this device has NVFP4, as (bool, reason) (since 2.8)."""
    try:
        from transformer_engine.pytorch.quantization import check_nvfp4_support
    except ImportError:
        from transformer_engine.pytorch.fp8 import check_nvfp4_support

    return check_nvfp4_support


# --- training ---------------------------------------------------------------------------------------------


@TE.entry
def quantized_model_init() -> Any:
    """Scope in which layers are made with quantized weights, by its name since 2.9."""
    from transformer_engine.pytorch import quantized_model_init

    return quantized_model_init


@TE.entry
def fp8_model_init() -> Any:
    """Scope in which layers are made with FP8 weights, by its name before 2.9."""
    from transformer_engine.pytorch import fp8_model_init

    return fp8_model_init


@TE.entry
def checkpoint() -> Any:
    """Recomputation that keeps FP8 state right."""
    from transformer_engine.pytorch import checkpoint

    return checkpoint


@TE.entry
def make_graphed_callables() -> Any:
    """CUDA-graph capture that keeps FP8 state right."""
    from transformer_engine.pytorch import make_graphed_callables

    return make_graphed_callables
