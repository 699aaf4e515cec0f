"""Changes planted in real sources: each must be found, and blamed on the module that consumes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from megacpp_validate.canary.static.findings import ChangeKind as K
from megacpp_validate.canary.static.findings import Impact, ModuleVerdict, ReleaseSource, StaticResult
from megacpp_validate.canary.static.project import Source
from megacpp_validate.canary.static.release import Release
from megacpp_validate.canary.static.sweep import run_pair

RELEASE = "2.20.2"
PYTORCH = "transformer_engine/pytorch"
INIT = f"{PYTORCH}/__init__.py"
ATTENTION = f"{PYTORCH}/attention/dot_product_attention/dot_product_attention.py"
RECIPES = "transformer_engine/common/recipe/__init__.py"
EVERYWHERE = "*"


@dataclass(frozen=True)
class Plant:
    """One edit of the sources, and what must be said of it."""

    module: str
    kind: K
    file: str
    pattern: str
    replacement: str
    symbol: str
    parameter: str = ""
    impact: Impact = Impact.BREAKING


PARAMETER_RENAMED = [
    Plant("imports", K.PARAMETER_RENAMED, f"{PYTORCH}/quantization.py", r"(class autocast:.*?)recipe: Optional\[\"Recipe\"\]", r'\1quant_recipe: Optional["Recipe"]', "autocast", "recipe"),
    Plant("attention", K.PARAMETER_RENAMED, ATTENTION, r"(class DotProductAttention\(.*?)attention_type: str(.*?super\(\).__init__\([^)]*\)\n)", r"\1attention_kind: str\2        attention_type = attention_kind\n", "DotProductAttention", "attention_type"),
    Plant("linear_walker", K.PARAMETER_RENAMED, f"{PYTORCH}/module/linear.py", r"(class Linear\(.*?)in_features: int", r"\1in_feature_count: int", "Linear", "in_features"),
    Plant("expert_gemm", K.PARAMETER_RENAMED, f"{PYTORCH}/module/grouped_linear.py", r"(class GroupedLinear\(.*?)num_gemms: int", r"\1num_groups: int", "GroupedLinear", "num_gemms"),
    Plant("permute", K.PARAMETER_RENAMED, f"{PYTORCH}/permutation.py", r"(def moe_unpermute\(.*?)merging_probs", r"\1merge_probs", "moe_unpermute", "merging_probs"),
    Plant("native_block", K.PARAMETER_RENAMED, f"{PYTORCH}/module/layernorm_mlp.py", r"(class LayerNormMLP\(.*?)ffn_hidden_size: int", r"\1ffn_size: int", "LayerNormMLP", "ffn_hidden_size"),
    Plant("layer_spec", K.PARAMETER_RENAMED, f"{PYTORCH}/transformer.py", r"(class TransformerLayer\(.*?)attn_input_format: str", r"\1input_format: str", "TransformerLayer", "attn_input_format"),
]  # fmt: skip

DEFAULT_CHANGED = [
    Plant("imports", K.DEFAULT_CHANGED, RECIPES, r"(class DelayedScaling\(.*?)fp8_dpa: bool = False", r"\1fp8_dpa: bool = True", "DelayedScaling", "fp8_dpa", Impact.RISK),
    Plant("attention", K.DEFAULT_CHANGED, ATTENTION, r"(class DotProductAttention\(.*?)softmax_type: str = \"vanilla\"", r'\1softmax_type: str = "learnable"', "DotProductAttention", "softmax_type", Impact.RISK),
    Plant("linear_walker", K.DEFAULT_CHANGED, f"{PYTORCH}/module/linear.py", r"(class Linear\(.*?)sequence_parallel: bool = False", r"\1sequence_parallel: bool = True", "Linear", "sequence_parallel", Impact.RISK),
    Plant("expert_gemm", K.DEFAULT_CHANGED, f"{PYTORCH}/module/grouped_linear.py", r"(class GroupedLinear\(.*?)fuse_wgrad_accumulation: bool = False", r"\1fuse_wgrad_accumulation: bool = True", "GroupedLinear", "fuse_wgrad_accumulation", Impact.RISK),
    Plant("permute", K.DEFAULT_CHANGED, f"{PYTORCH}/permutation.py", r"(def moe_unpermute\(.*?)pad_offsets: Optional\[torch.Tensor\] = None", r"\1pad_offsets: Optional[torch.Tensor] = ()", "moe_unpermute", "pad_offsets", Impact.RISK),
    Plant("native_block", K.DEFAULT_CHANGED, f"{PYTORCH}/module/layernorm_mlp.py", r"(class LayerNormMLP\(.*?)zero_centered_gamma: bool = False", r"\1zero_centered_gamma: bool = True", "LayerNormMLP", "zero_centered_gamma", Impact.RISK),
    Plant("layer_spec", K.DEFAULT_CHANGED, f"{PYTORCH}/transformer.py", r"(class TransformerLayer\(.*?)layernorm_epsilon: float = 1e-5", r"\1layernorm_epsilon: float = 1e-6", "TransformerLayer", "layernorm_epsilon", Impact.RISK),
]  # fmt: skip

MOVED = [
    Plant("imports", K.MOVED, INIT, r"(from transformer_engine.pytorch.distributed import) checkpoint\n", r"\1 checkpoint as _checkpoint\n", "checkpoint"),
    Plant("attention", K.MOVED, INIT, r"from transformer_engine.pytorch.attention import DotProductAttention\n", "", "DotProductAttention"),
    Plant("linear_walker", K.MOVED, INIT, r"from transformer_engine.pytorch.module import Linear\n", "", "Linear"),
    Plant("expert_gemm", K.MOVED, INIT, r"from transformer_engine.pytorch.module import GroupedLinear\n", "", "GroupedLinear"),
    Plant("permute", K.MOVED, INIT, r"    moe_permute_with_probs,\n", "", "moe_permute_with_probs"),
    Plant("native_block", K.MOVED, INIT, r"from transformer_engine.pytorch.module import LayerNormMLP\n", "", "LayerNormMLP"),
    Plant("layer_spec", K.MOVED, INIT, r"from transformer_engine.pytorch.module import RMSNorm\n", "", "RMSNorm"),
]  # fmt: skip

REMOVED = [
    Plant("imports", K.REMOVED, EVERYWHERE, r"\bmake_graphed_callables\b", "zz_ab", "make_graphed_callables"),
    Plant("attention", K.REMOVED, EVERYWHERE, r"\bDotProductAttention\b", "ZzCd", "DotProductAttention"),
    Plant("linear_walker", K.REMOVED, EVERYWHERE, r"\bLinear\b", "ZzEf", "Linear"),
    Plant("expert_gemm", K.REMOVED, EVERYWHERE, r"\bGroupedLinear\b", "ZzGh", "GroupedLinear"),
    Plant("permute", K.REMOVED, EVERYWHERE, r"\bmoe_unpermute\b", "zz_ij", "moe_unpermute"),
    Plant("native_block", K.REMOVED, EVERYWHERE, r"\bLayerNormMLP\b", "ZzKl", "LayerNormMLP"),
    Plant("layer_spec", K.REMOVED, EVERYWHERE, r"\bTransformerLayer\b", "ZzMn", "TransformerLayer"),
]  # fmt: skip

OTHER_KINDS = [
    Plant("imports", K.PARAMETER_REMOVED, RECIPES, r"(class DelayedScaling\(.*?)    reduce_amax: bool = True\n", r"\1", "DelayedScaling", "reduce_amax", Impact.RISK),
    Plant("imports", K.ATTRIBUTE_REMOVED, f"{PYTORCH}/quantization.py", r"def get_fp8_group\(", "def group_of_fp8(", "FP8GlobalStateManager", "get_fp8_group"),
    Plant("imports", K.IMPORT_REQUIREMENT_ADDED, INIT, r"\nimport torch\n", "\nimport torch\nimport nvdlfw_inspect\n", "pytorch", "nvdlfw_inspect", Impact.RISK),
    Plant("attention", K.GUARD_ADDED, ATTENTION, r"(class DotProductAttention\(.*?super\(\).__init__\([^)]*\)\n)", r'\1        if qkv_format == "bshd":\n            raise ValueError("bshd is gone")\n', "DotProductAttention", "qkv_format"),
    Plant("linear_walker", K.DEPRECATED, f"{PYTORCH}/module/linear.py", r"(class Linear\(.*?super\(\).__init__\([^)]*\)\n)", r'\1        if params_dtype is not None:\n            warnings.warn("params_dtype is deprecated", DeprecationWarning)\n', "Linear", "params_dtype", Impact.RISK),
    Plant("expert_gemm", K.PARAMETER_REQUIRED, f"{PYTORCH}/module/grouped_linear.py", r"(class GroupedLinear\(.*?def forward\(\s*self,\s*inp: torch.Tensor,.*?\n)(        is_first_microbatch)", r"\1        *,\n        layout: str,\n\2", "GroupedLinear", "layout"),
    Plant("permute", K.PARAMETER_REORDERED, f"{PYTORCH}/permutation.py", r"(def moe_permute_with_probs\(\s*inp: torch.Tensor,\s*)probs: torch.Tensor,(\s*)routing_map: torch.Tensor,", r"\1routing_map: torch.Tensor,\2probs: torch.Tensor,", "moe_permute_with_probs", "probs"),
    Plant("permute", K.PARAMETER_KEYWORD_ONLY, f"{PYTORCH}/permutation.py", r"(def moe_sort_chunks_by_index\(\s*inp: torch.Tensor,\s*split_sizes: torch.Tensor,\s*)(sorted_index)", r"\1*, \2", "moe_sort_chunks_by_index", "sorted_index"),
    Plant("permute", K.RETURN_CHANGED, f"{PYTORCH}/permutation.py", r"(def moe_sort_chunks_by_index_with_probs\(.*?)return output, permuted_probs", r"\1return output, permuted_probs, output", "moe_sort_chunks_by_index_with_probs"),
    Plant("native_block", K.PARAMETER_REMOVED, f"{PYTORCH}/module/layernorm_mlp.py", r"(class LayerNormMLP\(.*?)        activation: str = \"gelu\",\n", r"\1", "LayerNormMLP", "activation"),
    Plant("layer_spec", K.DEFAULT_MEANING_CHANGED, f"{PYTORCH}/transformer.py", r"(class TransformerLayer\(.*?)(        self.self_attn_mask_type = )", r"\1        if kv_channels is None:\n            kv_channels = hidden_size // 2\n\2", "TransformerLayer", "kv_channels", Impact.RISK),
]  # fmt: skip


SAME_SYMBOL_AGAIN = [
    Plant("imports", K.CONTEXT_MANAGER_LOST, f"{PYTORCH}/quantization.py", r"(class autocast:.*?)def __exit__\(", r"\1def leave(", "autocast"),
    Plant("layer_spec", K.RENAMED, EVERYWHERE, r"\bTransformerLayer\b", "TransformerLayerV2", "TransformerLayer"),
]  # fmt: skip


def plant(folder: Path, plants: list[Plant]) -> None:
    for one in plants:
        files = folder.rglob("*.py") if one.file == EVERYWHERE else [folder / one.file]
        count = 0
        for file in files:
            text, changed = re.subn(
                one.pattern,
                one.replacement,
                file.read_text(),
                count=0 if one.file == EVERYWHERE else 1,
                flags=re.DOTALL,
            )
            if changed:
                file.write_text(text)
            count += changed
        assert count, f"the plant did not take: {one}"


Judge = Callable[[Path], StaticResult]
Judged = Callable[[str], StaticResult]


@pytest.fixture(scope="module")
def judge(release_of: Callable[[str], Release], bridge_source: Source) -> Judge:
    """What is said of the release, once it is as it is in this folder."""

    def compare(after: Path) -> StaticResult:
        new = Release(ReleaseSource(version="planted", wheel="a folder", sha256=""), after)
        return run_pair(release_of(RELEASE), new, bridge_source, tool="test")

    return compare


def said_by(result: StaticResult) -> set[tuple[str, K, str, str, Impact]]:
    loud = [f for f in result.findings if f.impact is not Impact.HARMLESS]
    return {(f.module, f.kind, f.symbol.rpartition(".")[2], f.parameter, f.impact) for f in loud}


def wanted_of(plants: list[Plant]) -> set[tuple[str, K, str, str, Impact]]:
    return {(p.module, p.kind, p.symbol, p.parameter, p.impact) for p in plants}


GROUPS = {
    "signatures": PARAMETER_RENAMED + DEFAULT_CHANGED,
    "moved": MOVED,
    "removed": REMOVED,
    "other-kinds": OTHER_KINDS,
    "same-symbol-again": [*SAME_SYMBOL_AGAIN, REMOVED[2]],
}


@pytest.fixture(scope="module")
def judged(judge: Judge, unpack: Callable[[str, Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """A group of plants to what is said of them; each is judged once."""

    @cache
    def look(group: str) -> StaticResult:
        after = unpack(RELEASE, tmp_path_factory.mktemp("planted") / "after")
        plant(after, GROUPS[group])
        return judge(after)

    return look


SECOND_LOOKS = {"moved", "removed", "same-symbol-again"}
ROWS = [pytest.param(name, marks=pytest.mark.thorough if name in SECOND_LOOKS else ()) for name in GROUPS]


@pytest.mark.parametrize("group", ROWS)
def test_each_plant_is_found_blamed_on_its_module_and_nothing_else_is_said(group: str, judged: Judged) -> None:
    plants, result = GROUPS[group], judged(group)
    assert said_by(result) == wanted_of(plants)
    verdicts = {row.module: row.verdict for row in result.modules}
    for one in plants:
        # A module whose own finding is a risk may be red because of a plant in another that it shares an entry with.
        worse = {ModuleVerdict.BREAKS, ModuleVerdict.CASCADE, ModuleVerdict.RISK}
        assert verdicts[one.module] in ({ModuleVerdict.BREAKS} if one.impact is Impact.BREAKING else worse)


def test_an_untouched_copy_says_nothing(judge: Judge, unpack: Callable[[str, Path], Path], tmp_path: Path) -> None:
    result = judge(unpack(RELEASE, tmp_path / "after"))
    assert not result.findings
    assert result.not_consumed == 0
    assert {m.verdict for m in result.modules} == {ModuleVerdict.CLEAN}


def test_a_shared_symbol_is_a_cascade_in_the_later_module(judged: Judged) -> None:
    rows = {m.module: m for m in judged("same-symbol-again").modules}
    assert rows["linear_walker"].verdict is ModuleVerdict.BREAKS
    assert rows["native_block"].verdict is ModuleVerdict.CASCADE
    assert rows["native_block"].under == "linear_walker"
    assert rows["permute"].verdict is ModuleVerdict.CLEAN
