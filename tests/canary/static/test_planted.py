"""Changes planted in real sources: each must be found, and blamed on the module that consumes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
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


PLANTS = [
    Plant("imports", K.PARAMETER_REMOVED, RECIPES, r"(class DelayedScaling\(.*?)    reduce_amax: bool = True\n", r"\1", "DelayedScaling", "reduce_amax", Impact.RISK),
    Plant("imports", K.ATTRIBUTE_REMOVED, f"{PYTORCH}/quantization.py", r"def get_fp8_group\(", "def group_of_fp8(", "FP8GlobalStateManager", "get_fp8_group"),
    Plant("imports", K.IMPORT_REQUIREMENT_ADDED, INIT, r"\nimport torch\n", "\nimport torch\nimport nvdlfw_inspect\n", "pytorch", "nvdlfw_inspect", Impact.RISK),
    Plant("attention", K.GUARD_ADDED, ATTENTION, r"(class DotProductAttention\(.*?super\(\).__init__\([^)]*\)\n)", r'\1        if qkv_format in ("bshd", "sbhd"):\n            raise ValueError("bshd is gone")\n', "DotProductAttention", "qkv_format"),
    Plant("linear_walker", K.DEPRECATED, f"{PYTORCH}/module/linear.py", r"(class Linear\(.*?super\(\).__init__\([^)]*\)\n)", r'\1        if params_dtype is not None:\n            warnings.warn("params_dtype is deprecated", DeprecationWarning)\n', "Linear", "params_dtype", Impact.RISK),
    Plant("expert_gemm", K.PARAMETER_REQUIRED, f"{PYTORCH}/module/grouped_linear.py", r"(class GroupedLinear\(.*?def forward\(\s*self,\s*inp: torch.Tensor,.*?\n)(        is_first_microbatch)", r"\1        *,\n        layout: str,\n\2", "GroupedLinear", "layout"),
    Plant("permute", K.PARAMETER_REORDERED, f"{PYTORCH}/permutation.py", r"(def moe_permute_with_probs\(\s*inp: torch.Tensor,\s*)probs: torch.Tensor,(\s*)routing_map: torch.Tensor,", r"\1routing_map: torch.Tensor,\2probs: torch.Tensor,", "moe_permute_with_probs", "probs"),
    Plant("permute", K.PARAMETER_KEYWORD_ONLY, f"{PYTORCH}/permutation.py", r"(def moe_sort_chunks_by_index\(\s*inp: torch.Tensor,\s*split_sizes: torch.Tensor,\s*)(sorted_index)", r"\1*, \2", "moe_sort_chunks_by_index", "sorted_index"),
    Plant("permute", K.RETURN_CHANGED, f"{PYTORCH}/permutation.py", r"(def moe_sort_chunks_by_index_with_probs\(.*?)return output, permuted_probs", r"\1return output, permuted_probs, output", "moe_sort_chunks_by_index_with_probs"),
    Plant("native_block", K.PARAMETER_REMOVED, f"{PYTORCH}/module/layernorm_mlp.py", r"(class LayerNormMLP\(.*?)        activation: str = \"gelu\",\n", r"\1", "LayerNormMLP", "activation"),
    Plant("layer_spec", K.DEFAULT_MEANING_CHANGED, f"{PYTORCH}/transformer.py", r"(class TransformerLayer\(.*?)(        self.self_attn_mask_type = )", r"\1        if kv_channels is None:\n            kv_channels = hidden_size // 2\n\2", "TransformerLayer", "kv_channels", Impact.RISK),
]  # fmt: skip


def plant(folder: Path, plants: list[Plant]) -> None:
    for one in plants:
        file = folder / one.file
        text, count = re.subn(one.pattern, one.replacement, file.read_text(), count=1, flags=re.DOTALL)
        assert count, f"the plant did not take: {one}"
        file.write_text(text)


Judge = Callable[[Path], StaticResult]


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


def test_each_plant_is_found_blamed_on_its_module_and_nothing_else_is_said(
    judge: Judge, unpack: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    plants, after = PLANTS, unpack(RELEASE, tmp_path / "after")
    plant(after, plants)
    result = judge(after)
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
