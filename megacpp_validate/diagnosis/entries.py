"""Which entry points of Transformer Engine a module's checks, frames and texts are about: data, by accessor's name.

It mirrors the call sites of the bridge; `tests/canary/dynamic/test_causes.py` holds it to the surface that the static
tier derives from them. Two modules whose failures are about no entry point in common are not one fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ..evidence.receipt import Check

_PADDING: Final = ("fp8_padding", "fp8_unpadding")
_CHUNKS: Final = ("moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs")
SCOPE: Final = (
    "autocast", "fp8_autocast", "quantized_model_init", "fp8_model_init", "fp8_format", "delayed_scaling",
    "float8_current_scaling", "float8_block_scaling", "mxfp8_block_scaling", "nvfp4_block_scaling",
    "check_fp8_support", "check_mxfp8_support", "check_fp8_block_scaling_support", "check_nvfp4_support",
    "fp8_state_manager",
)  # fmt: skip

FIREWALL: Final = "imports"  # what every module stands on, and whose low-precision scope every layer is run in
# Module -> accessors of what it uses.
USES: Final[dict[str, tuple[str, ...]]] = {
    "imports": (*SCOPE, "checkpoint", "make_graphed_callables"),
    "attention": ("dot_product_attention",),
    "linear_walker": ("linear",),
    "permute": ("moe_permute_with_probs", "moe_unpermute", *_CHUNKS, *_PADDING),
    "expert_gemm": ("grouped_linear", *_PADDING),  # pads through bridge/permute.py
    "native_block": ("layernorm_linear", "dot_product_attention", "linear", "layernorm_mlp"),
    "layer_spec": ("transformer_layer", "layernorm_linear", "grouped_linear", "layernorm_mlp", "rmsnorm"),
}
# The layers of the whole block from its input to its output: a fault in the backward of one does not reach the
# gradients of those after it.
BLOCK: Final = "native_block"
BLOCK_CHAIN: Final = USES[BLOCK]

# Probe -> (pattern of a check's name, accessors), first match wins. What matches none is about all that it uses. Other
# vendors stand beside them by the name of the bridge's file: their checks are about nothing of Transformer Engine.
_CHECKS: Final[dict[str, tuple[tuple[str, tuple[str, ...]], ...]]] = {
    "imports": ((r"^recompute\.", ("checkpoint",)),),
    "attention": ((r"(?:^|\.)fa[34]\.", ("flash_attention",)),),
    "permute": (
        (r"chunks", _CHUNKS),
        (r"aligned", ("moe_permute_with_probs", "moe_unpermute", *_PADDING)),
        (r"\.grad\.(?:tokens|probs)$|\.(?:rows|row_probs)$|permute\..*backend", USES["permute"]),
    ),
    "expert_gemm": (
        (r"(?:^|\.)deep_gemm\.", ("deep_gemm",)),
        (r"^(?:fp32|bf16)\.", ("grouped_linear",)),
    ),
    "native_block": (
        (r"\.(?:grad\.qkv\.|qkv\.(?:renewed|kept)$)", ("layernorm_linear",)),
        (r"\.(?:grad\.out\.|out\.(?:renewed|kept)$)", ("linear",)),
        (r"\.(?:grad\.mlp\.|mlp\.(?:renewed|kept)$)", ("layernorm_mlp",)),
    ),
    "layer_spec": (
        (r"(?:^|\.)whole\.", (*USES[BLOCK], "transformer_layer")),
        (r"(?:^|\.)norm\.|\.norm$", ("rmsnorm",)),
        (r"(?:^|\.)(?:mlp|MLP)(?:\.|$)", ("layernorm_mlp",)),
        (r"(?:^|\.)experts?(?:\.|$)|\.E$", ("grouped_linear", *_PADDING)),
        (r"^\w+\.in_projection(?:\.|$)", ("layernorm_linear",)),
        (r"(?:^|\.)(?:mixer|recurrent)(?:\.|$)|\.[MR]$", ("layernorm_linear", "rmsnorm")),
        (r"^A\.|\.A$", ("transformer_layer",)),
    ),
}
# Class or function of Transformer Engine as a text, a frame or the graph shows it -> accessor.
_NAMES: Final[dict[str, str]] = {
    "DotProductAttention": "dot_product_attention", "LayerNormLinear": "layernorm_linear",
    "LayerNormMLP": "layernorm_mlp", "GroupedLinear": "grouped_linear", "TransformerLayer": "transformer_layer",
    "RMSNorm": "rmsnorm", "Linear": "linear", "moe_permute_with_probs": "moe_permute_with_probs",
    "moe_unpermute": "moe_unpermute", "moe_sort_chunks_by_index": "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs": "moe_sort_chunks_by_index_with_probs", "Fp8Padding": "fp8_padding",
    "Fp8Unpadding": "fp8_unpadding", "autocast": "autocast", "fp8_autocast": "fp8_autocast",
    "DelayedScaling": "delayed_scaling", "Float8CurrentScaling": "float8_current_scaling",
    "Float8BlockScaling": "float8_block_scaling", "MXFP8BlockScaling": "mxfp8_block_scaling",
    "NVFP4BlockScaling": "nvfp4_block_scaling", "FP8GlobalStateManager": "fp8_state_manager",
    "checkpoint": "checkpoint", "make_graphed_callables": "make_graphed_callables",
}  # fmt: skip
# File of Transformer Engine -> accessors whose code it is. Files that many share (module/base.py, gemm.py) are in no
# row: they tell nothing.
_FILES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    (r"pytorch/attention\b|cpp_extensions/fused_attn|fused_attn_\w+\.cu", ("dot_product_attention",)),
    (r"pytorch/(?:module/)?linear\.py", ("linear",)),
    (r"pytorch/(?:module/)?layernorm_linear\.py", ("layernorm_linear",)),
    (r"pytorch/(?:module/)?layernorm_mlp\.py", ("layernorm_mlp",)),
    (r"pytorch/(?:module/)?grouped_linear\.py", ("grouped_linear",)),
    (r"module/rmsnorm\.py|ops/basic/rmsnorm", ("rmsnorm",)),
    (r"module/fp8_(?:un)?padding\.py", _PADDING),
    (
        r"pytorch/permutation|triton/permutation|common/permutation",
        ("moe_permute_with_probs", "moe_unpermute", *_CHUNKS),
    ),
    (r"common/recipe|pytorch/quantization\.py|pytorch/fp8\.py", SCOPE),
)


@dataclass(frozen=True)
class SharedPart:
    """Code of Transformer Engine that several entry points run.

    Attributes:
        name: in a sentence.
        where: file below transformer_engine/, or what calls it.
        shows: accessors of all that run it; each has to be wrong.
        may_show: accessors of those that run it by another way into the same file, and may be wrong.
    """

    name: str
    where: str
    shows: frozenset[str]
    may_show: frozenset[str] = frozenset()


# Read in the sources of 2.12.0, 2.17.1 and 2.20.2: who imports `general_gemm`, and who ends in `rmsnorm_fwd`.
SHARED_PARTS: Final = (
    SharedPart(
        "the matrix product",
        "pytorch/cpp_extensions/gemm.py",
        frozenset({"linear", "layernorm_linear", "layernorm_mlp"}),
        frozenset({"grouped_linear"}),
    ),
    SharedPart("the norm", "rmsnorm_fwd and rmsnorm_bwd", frozenset({"layernorm_linear", "layernorm_mlp", "rmsnorm"})),
)


def entries_of_check(probe: str, check: Check) -> frozenset[str] | None:
    """Accessors that a check can be about; None where it can be any that its module uses."""
    words = check.name.split(".")
    if words[0] == "accessor":
        return frozenset(words[1:2])
    if words[-1] == "layers" and (named := entries_in(check.detail)):
        return frozenset(named)
    for pattern, entries in _CHECKS.get(probe, ()):
        if re.search(pattern, check.name):
            return frozenset(entries)
    return None


def entries_in(text: str, among: Iterable[str] | None = None) -> tuple[str, ...]:
    """Accessors whose class or function a text names, and of the files that it shows, each once, in that order."""
    known = None if among is None else frozenset(among)
    found = [_NAMES[name] for name in re.findall(r"\w+", text) if name in _NAMES]
    found += re.findall(r"entry point `(\w+)`", text)
    for pattern, entries in _FILES:
        if re.search(pattern, text):
            found += entries
    return tuple(dict.fromkeys(name for name in found if known is None or name in known))


def of_module(module: str) -> frozenset[str] | None:
    """Accessors of what a module uses; None for one that no row knows."""
    return frozenset(USES[module]) if module in USES else None
