"""What kind of check failed, in which precision and direction, and over which entry points: read from its name.

The names are the probes' own. A name that no row below knows is still a failed check: of contract where nothing was
measured, else of numbers, over everything that its module uses.
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
BLOCK: Final = "native_block"

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
    (r"(?:pytorch|triton|common)/permutation", ("moe_permute_with_probs", "moe_unpermute", *_CHUNKS)),
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
    SharedPart("the matrix product", "pytorch/cpp_extensions/gemm.py",
               frozenset({"linear", "layernorm_linear", "layernorm_mlp"}), frozenset({"grouped_linear"})),
    SharedPart("the norm", "rmsnorm_fwd and rmsnorm_bwd", frozenset({"layernorm_linear", "layernorm_mlp", "rmsnorm"})),
)  # fmt: skip


def entries_of_symbol(path: str) -> frozenset[str]:
    """Accessors that a dotted name of Transformer Engine stands for; a layer of several parts stands for each part."""
    name = path.rpartition(".")[2]
    if name in ("TransformerLayer", "MultiheadAttention"):
        return frozenset((*USES[BLOCK], _NAMES.get(name, BLOCK)))
    files = (entries for pattern, entries in _FILES if re.search(pattern, f"{path.replace('.', '/')}.py"))
    return frozenset({_NAMES[name]} if name in _NAMES else set().union(*files))


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


class CheckKind(StrEnum):
    """What a failed check means."""

    NUMBERS = "numbers"  # out of bounds, not finite, another dtype or shape
    MEMORY = "memory"  # what calls keep on the device for good
    BACKEND = "backend"  # another path ran than was asked for
    ENTRY = "entry"  # an entry point that is not there
    RAISED = "raised"  # something was raised where nothing should be, or another class of it
    CONTRACT = "contract"  # what is refused, kept, restored, named or supported is not as agreed


class Precision(StrEnum):
    """What was computed in; a fault in one shows in the ones below it, not in the ones above."""

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
        backward: it is about gradients; None where a name does not tell.
        entries: accessors of the entry points that it can be about; None where it can be any.
        raised: what its detail says was raised, as "class: text"; empty where nothing was.
        shape: a tensor of another shape came out.
    """

    name: str
    kind: CheckKind
    precision: Precision
    backward: bool | None
    entries: frozenset[str] | None
    raised: str = ""
    shape: bool = False

    @property
    def of_scope(self) -> bool:
        """Whether a fault of the low-precision scope that it shows reaches the layers inside of the scope."""
        return not self.name.startswith(("refuses", "availability", "support", "scope.refuses", "scope.second-entry"))

    @property
    def shown(self) -> str:
        """Its kind as a signature keeps it: not which case, nor how many."""
        if self.kind is CheckKind.RAISED:
            return f"raised {self.raised.partition(':')[0]}"
        if self.kind is CheckKind.ENTRY:
            return f"entry {', '.join(sorted(self.entries or ()))}"
        if self.kind is CheckKind.CONTRACT:
            return f"contract {_stem(self.name)}"
        way = {None: "", True: " backward", False: " forward"}[self.backward]
        return f"{self.kind.value}{f' {self.precision.value}' if self.precision.value else ''}{way}"


def read_failed_checks(receipt: Receipt) -> tuple[FailedCheck, ...]:
    """Every failed check of a receipt, in its order."""
    return tuple(read_failed_check(receipt.probe, check) for check in receipt.checks if not check.passed)


def read_failed_check(probe: str, check: Check) -> FailedCheck:
    """What a failed check of a probe means."""
    words = check.name.split(".")
    kind, raised = _kind(check, words)
    shape = kind is CheckKind.NUMBERS and bool(re.search(r"\bshape\b|\] instead of ", check.detail))
    backward = True if _BACKWARD.intersection(words) else False if _FORWARD.intersection(words) else None
    entries = entries_of_check(probe, check)
    return FailedCheck(check.name, kind, _precision(words), backward, entries, raised, shape)


def _kind(check: Check, words: list[str]) -> tuple[CheckKind, str]:
    name, detail = check.name, check.detail
    if words[0] == "accessor":
        return CheckKind.ENTRY, ""
    if not check.parts and (found := _RAISED.search(detail)):
        return CheckKind.RAISED, f"{found[1].rpartition('.')[2]}: {found[2]}"
    if _says_nothing_finite(check):
        return CheckKind.NUMBERS, ""  # also where what failed asks which precision it was: NaN is in none
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
    """Whether what was measured is no number: of a part, a receipt keeps None in place of NaN."""
    if not check.parts:
        return bool(_NO_NUMBER.search(check.detail))
    failed = [part.observed for part in check.parts if not part.passed]
    return bool(failed) and all(one is None or not math.isfinite(one) for one in failed)


_SCOPE: Final = re.compile(r"scope\.\w+\.(?:on|recipe)$")
_NO_NUMBER: Final = re.compile(r"\brelative error nan\b")
_CONTRACT: Final = re.compile(r"(?:refuses|scope|support|availability|plan|swap|spec|weights|shards|checkpoints)\b")


def _precision(words: list[str]) -> Precision:
    if "restored" in words:  # a scope that is left open is around everything after it
        return Precision.ANY
    known = {"fp32": Precision.FP32} | dict.fromkeys(_HALF, Precision.HALF) | dict.fromkeys(_LOW, Precision.LOW)
    return next((known[word] for word in words if word in known), Precision.ANY)


def _stem(name: str) -> str:
    """A name without its case: its first word, and its last one where that is no number."""
    words = name.split(".")
    return ".".join(dict.fromkeys((words[0], words[-1]))) if len(words) > 1 else name
