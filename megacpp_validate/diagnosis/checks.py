"""Kind, precision, direction and entry points of a failed check, read from its name.

Probes define the names. A check whose name no row below matches has the kind "contract" if nothing was measured, else
"numbers", and concerns every entry point of its module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ..evidence.receipt import Check, Receipt

_PADDING: Final = ("fp8_padding", "fp8_unpadding")
_CHUNKS: Final = ("moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs")
SCOPE: Final = (
    "autocast", "fp8_autocast", "quantized_model_init", "fp8_model_init", "fp8_format", "delayed_scaling",
    "float8_current_scaling", "float8_block_scaling", "mxfp8_block_scaling", "nvfp4_block_scaling",
    "check_fp8_support", "check_mxfp8_support", "check_fp8_block_scaling_support", "check_nvfp4_support",
    "fp8_state_manager",
)  # fmt: skip

FIREWALL: Final = "imports"  # every module depends on it, and every layer runs in its low-precision scope
# Module -> accessors that it uses.
USES: Final[dict[str, tuple[str, ...]]] = {
    "imports": (*SCOPE, "checkpoint", "make_graphed_callables"),
    "attention": ("dot_product_attention",),
    "linear_walker": ("linear",),
    "permute": ("moe_permute_with_probs", "moe_unpermute", *_CHUNKS, *_PADDING),
    "expert_gemm": ("grouped_linear", *_PADDING),  # pads through bridge/permute.py
    "native_block": ("layernorm_linear", "dot_product_attention", "linear", "layernorm_mlp"),
    "layer_spec": ("transformer_layer", "layernorm_linear", "grouped_linear", "layernorm_mlp", "rmsnorm"),
}
BLOCK: Final = "native_block"

# Probe -> (pattern of a check's name, accessors); the first match decides, no match means every accessor of the module.
# Checks of other vendors have the name of the bridge's file: they do not concern Transformer Engine.
_CHECKS: Final[dict[str, tuple[tuple[str, tuple[str, ...]], ...]]] = {
    "imports": ((r"^recompute\.", ("checkpoint",)),),
    "attention": ((r"(?:^|\.)fa[34]\.", ("flash_attention",)),),
    "permute": (
        (r"chunks", _CHUNKS),
        (r"aligned", ("moe_permute_with_probs", "moe_unpermute", *_PADDING)),
        (r"\.grad\.(?:tokens|probs)$|\.(?:rows|row_probs)$|permute\..*backend", USES["permute"]),
    ),
    "expert_gemm": ((r"(?:^|\.)deep_gemm\.", ("deep_gemm",)), (r"^(?:fp32|bf16)\.", ("grouped_linear",))),
    "native_block": (
        (r"\.(?:grad\.qkv\.|qkv\.(?:renewed|kept)$)", ("layernorm_linear",)),
        (r"\.(?:grad\.out\.|out\.(?:renewed|kept)$)", ("linear",)),
        (r"\.(?:grad\.mlp\.|mlp\.(?:renewed|kept)$)", ("layernorm_mlp",)),
    ),
    "layer_spec": (
        (r"(?:^|\.)whole\.|\.parameters$", (*USES[BLOCK], "transformer_layer")),
        (r"(?:^|\.)norm\.|\.norm$", ("rmsnorm",)),
        (r"(?:^|\.)(?:mlp|MLP)(?:\.|$)", ("layernorm_mlp",)),
        (r"(?:^|\.)experts?(?:\.|$)|\.E$", ("grouped_linear", *_PADDING)),
        (r"^\w+\.in_projection(?:\.|$)", ("layernorm_linear",)),
        (r"(?:^|\.)(?:mixer|recurrent)(?:\.|$)|\.[MR]$", ("layernorm_linear", "rmsnorm")),
        (r"^A\.|\.A$", ("transformer_layer",)),
    ),
}
# Class or function of Transformer Engine in texts, frames and the autograd graph -> accessor.
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
# File of Transformer Engine -> accessors that it implements. Shared files (module/base.py, gemm.py) have no row.
_FILES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    (r"pytorch/attention\b|cpp_extensions/fused_attn|fused_attn_\w+\.cu", ("dot_product_attention",)),
    (r"pytorch/(?:module/)?linear\.py", ("linear",)),
    (r"pytorch/(?:module/)?layernorm_linear\.py", ("layernorm_linear",)),
    (r"pytorch/(?:module/)?layernorm_mlp\.py", ("layernorm_mlp",)),
    (r"pytorch/(?:module/)?grouped_linear\.py", ("grouped_linear",)),
    (r"module/rmsnorm\.py|ops/basic/rmsnorm", ("rmsnorm",)),
    (r"module/fp8_(?:un)?padding\.py", _PADDING),
    (r"(?:pytorch|triton|common)/permutation", ("moe_permute_with_probs", "moe_unpermute", *_CHUNKS)),
    (r"common/recipe|pytorch/quantization\.py|pytorch/fp8\.py", SCOPE),
)


@dataclass(frozen=True)
class SharedPart:
    """Code of Transformer Engine that several entry points run.

    Attributes:
        name: for sentences.
        where: file below transformer_engine/, or its functions.
        shows: accessors that run it: a fault shows in each of them.
        may_show: accessors that enter the same file another way: a fault may show in them.
    """

    name: str
    where: str
    shows: frozenset[str]
    may_show: frozenset[str] = frozenset()


# From the sources of 2.12.0, 2.17.1 and 2.20.2: users of `general_gemm` and of `rmsnorm_fwd`.
SHARED_PARTS: Final = (
    SharedPart("the matrix product", "pytorch/cpp_extensions/gemm.py",
               frozenset({"linear", "layernorm_linear", "layernorm_mlp"}), frozenset({"grouped_linear"})),
    SharedPart("the norm", "rmsnorm_fwd and rmsnorm_bwd", frozenset({"layernorm_linear", "layernorm_mlp", "rmsnorm"})),
)  # fmt: skip


def entries_of_symbol(path: str) -> frozenset[str]:
    """Accessors of a dotted name of Transformer Engine; a composed layer has the accessors of its parts."""
    name = path.rpartition(".")[2]
    if name in ("TransformerLayer", "MultiheadAttention"):
        return frozenset((*USES[BLOCK], _NAMES.get(name, BLOCK)))
    files = (entries for pattern, entries in _FILES if re.search(pattern, f"{path.replace('.', '/')}.py"))
    return frozenset({_NAMES[name]} if name in _NAMES else set().union(*files))


def entries_of_check(probe: str, check: Check) -> frozenset[str] | None:
    """Accessors that a check concerns; None for any accessor of its module."""
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
    """Accessors of the classes, functions and files that a text names, without duplicates."""
    known = None if among is None else frozenset(among)
    found = [_NAMES[name] for name in re.findall(r"\w+", text) if name in _NAMES]
    found += re.findall(r"entry point `(\w+)`", text)
    for pattern, entries in _FILES:
        if re.search(pattern, text):
            found += entries
    return tuple(dict.fromkeys(name for name in found if known is None or name in known))


class CheckKind(StrEnum):
    """What a failed check means."""

    NUMBERS = "numbers"  # out of bounds, not finite, another dtype or shape
    MEMORY = "memory"  # device memory that calls never free
    BACKEND = "backend"  # another backend ran than requested
    ENTRY = "entry"  # a missing entry point
    RAISED = "raised"  # an unexpected exception
    CONTRACT = "contract"  # a refusal, a kept value, a name or a supported feature differs from the contract


class Precision(StrEnum):
    """Precision of a computation; a fault in one precision shows in lower ones, not in higher ones."""

    FP32 = "fp32"
    HALF = "bf16"  # and fp16
    LOW = "fp8"  # and fp4
    ANY = ""

    @property
    def level(self) -> int:
        """0 for the highest."""
        return list(Precision).index(self)


_HALF: Final = frozenset({"bf16", "fp16", "bfloat16", "float16"})
_LOW: Final = frozenset({
    "fp8", "delayed", "current", "block", "mxfp8", "nvfp4", "amax", "scope", "float8_e4m3fn", "float8_e5m2",
})  # fmt: skip
_BACKWARD: Final = frozenset({"grad", "dgrad", "wgrad", "backward"})
_FORWARD: Final = frozenset({"forward", "rows", "row_probs", "out"})
_TENSORS: Final = (
    _BACKWARD | _FORWARD | {"bias", "dtype", "finite", "history", "scale", "blocks", "unpadded", "applied"}
)
_RAISED: Final = re.compile(
    r"(?:^|; |cannot be used: )([A-Za-z_][\w.]*(?:Error|Exception|Missing|Mismatch|Exit|NoBackend))"
    r"(?: instead of \w+)?: (.*)",
    re.DOTALL,
)
_BY_NATIVE: Final = re.compile(r"\bby native\b|, seen native\b|not seen: ")


@dataclass(frozen=True)
class FailedCheck:
    """One check that failed.

    Attributes:
        backward: whether it checks gradients; None if unknown.
        entries: accessors that it concerns; None for any.
        raised: exception in its detail, as "class: text"; empty for none.
    """

    name: str
    kind: CheckKind
    precision: Precision
    backward: bool | None
    entries: frozenset[str] | None
    raised: str = ""

    @property
    def shown(self) -> str:
        """Kind for signatures, without the case."""
        if self.kind is CheckKind.RAISED:
            return f"raised {self.raised.partition(':')[0]}"
        if self.kind is CheckKind.ENTRY:
            return f"entry {', '.join(sorted(self.entries or ()))}"
        if self.kind is CheckKind.CONTRACT:
            return f"contract {_stem(self.name)}"
        way = {None: "", True: " backward", False: " forward"}[self.backward]
        return f"{self.kind.value}{f' {self.precision.value}' if self.precision.value else ''}{way}"


def read_failed_checks(receipt: Receipt) -> tuple[FailedCheck, ...]:
    """Failed checks of a receipt, in its order."""
    return tuple(read_failed_check(receipt.probe, check) for check in receipt.checks if not check.passed)


def read_failed_check(probe: str, check: Check) -> FailedCheck:
    """Kind, precision, direction and entry points of a failed check."""
    words = check.name.split(".")
    kind, raised = _kind(check, words)
    backward = True if _BACKWARD.intersection(words) else False if _FORWARD.intersection(words) else None
    overwritten = words[-1] == "eval" and _OVERWRITTEN & {part.name for part in check.parts if not part.passed}
    precision = Precision.ANY if overwritten else _precision(words)  # tensors of any precision are read later
    return FailedCheck(check.name, kind, precision, backward, entries_of_check(probe, check), raised)


def _kind(check: Check, words: list[str]) -> tuple[CheckKind, str]:
    name, detail = check.name, check.detail
    if words[0] == "accessor":
        return CheckKind.ENTRY, ""
    if not check.parts and (found := _RAISED.search(detail)):
        return CheckKind.RAISED, f"{found[1].rpartition('.')[2]}: {found[2]}"
    if _says_nothing_finite(check):
        return CheckKind.NUMBERS, ""  # also for checks of the precision: NaN has none
    if words[-1] == "memory":
        return CheckKind.MEMORY, ""
    failed = {part.name for part in check.parts if not part.passed}
    if words[-1] in ("backend", "layers", "rounded") or "low-precision-ran" in failed or _SCOPE.match(name):
        return CheckKind.BACKEND, ""
    if not check.parts and (words[0] == "spec" or words[-1] == "codes") and _BY_NATIVE.search(detail):
        return CheckKind.BACKEND, ""
    measured = check.parts or words[0] == "amax" or name == "second-use"
    if measured or (not _CONTRACT.match(name) and _TENSORS.intersection(words)):
        return CheckKind.NUMBERS, ""
    return CheckKind.CONTRACT, ""


def _says_nothing_finite(check: Check) -> bool:
    """Whether the measured value is not finite; a receipt stores None for NaN."""
    if not check.parts:
        return bool(_NO_NUMBER.search(check.detail))
    failed = [part.observed for part in check.parts if not part.passed]
    return bool(failed) and all(one is None or not math.isfinite(one) for one in failed)


_OVERWRITTEN: Final = frozenset({"inputs", "earlier-outputs"})  # parts of an evaluation
_SCOPE: Final = re.compile(r"scope\.\w+\.(?:on|recipe)$")
_NO_NUMBER: Final = re.compile(r"\brelative error nan\b")
_CONTRACT: Final = re.compile(r"(?:refuses|scope|support|availability|plan|swap|spec|weights|shards|checkpoints)\b")


def _precision(words: list[str]) -> Precision:
    known = {"fp32": Precision.FP32} | dict.fromkeys(_HALF, Precision.HALF) | dict.fromkeys(_LOW, Precision.LOW)
    return next((known[word] for word in words if word in known), Precision.ANY)


def _stem(name: str) -> str:
    """First and last word of a name."""
    words = name.split(".")
    return ".".join(dict.fromkeys((words[0], words[-1]))) if len(words) > 1 else name
