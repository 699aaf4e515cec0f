"""What the bridge meets between real releases, each row verified by reading both releases' sources."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from megacpp_validate.canary.static.findings import ChangeKind as K
from megacpp_validate.canary.static.findings import Impact, StaticResult
from megacpp_validate.canary.static.project import Source
from megacpp_validate.canary.static.release import Release
from megacpp_validate.canary.static.sweep import run_pair

Row = tuple[str, K, str, str]
NEEDS, GUARD = K.IMPORT_REQUIREMENT_ADDED, K.GUARD_ADDED

# (old, new): everything that is breaking, and everything that is at risk: (module, kind, symbol, parameter).
CHANGED: dict[tuple[str, str], tuple[set[Row], set[Row]]] = {
    # RMSNorm left `weight.sequence_parallel` unset instead of False (pytorch/module/rmsnorm.py:129 -> :66)
    ("1.12.0", "1.13.0"): (set(), {("layer_spec", K.DEFAULT_CHANGED, "RMSNorm", "sequence_parallel")}),
    # einops imported unguarded (dot_product_attention/inference.py:9), torch >= 2.1 asserted (pytorch/__init__.py:78)
    ("2.1.0", "2.2.0"): (
        set(),
        {
            ("imports", NEEDS, "pytorch", "einops"),
            ("imports", NEEDS, "pytorch", ""),
            ("imports", NEEDS, "pytorch", "flash_attn_3.flash_attn_interface"),
            ("attention", GUARD, "DotProductAttention", "key_layer, query_layer"),
        },
    ),
    # moe_unpermute refuses an FP8 tensor (pytorch/permutation.py:362)
    ("2.2.0", "2.3.0"): (set(), {("permute", GUARD, "moe_unpermute", "inp")}),
    # the same step backwards takes away what the bridge passes
    ("2.3.0", "2.2.0"): (
        {
            ("imports", K.REMOVED, "Float8BlockScaling", ""),
            ("linear_walker", K.PARAMETER_REMOVED, "Linear", "name"),
            ("permute", K.PARAMETER_REMOVED, "Fp8Padding", "align_size"),
            ("permute", K.PARAMETER_REMOVED, "Fp8Unpadding", "align_size"),
        },
        {("imports", K.REMOVED, "check_fp8_block_scaling_support", "")},
    ),
    # onnx and onnxscript imported unguarded (pytorch/onnx_extensions.py:26-28)
    ("2.5.0", "2.6.0"): (set(), {("imports", NEEDS, "pytorch", "onnx"), ("imports", NEEDS, "pytorch", "onnxscript")}),
    # the FP8 scope got its new names; checks of the installed packages run at import (common/__init__.py:195-222)
    ("2.8.0", "2.9.0"): (
        set(),
        {
            ("imports", K.RENAMED, "fp8_autocast", ""),
            ("imports", K.RENAMED, "fp8_model_init", ""),
            ("imports", NEEDS, "pytorch", ""),
            # `assert self.fp8_format != Format.E5M2` (common/recipe/__init__.py:366), in the recipe's __post_init__
            ("imports", GUARD, "Float8BlockScaling", "fp8_format"),
        },
    ),
    # `assert num_out_tokens > 0` (pytorch/permutation.py:314): a step in which no token is routed now raises
    ("2.14.1", "2.15.0"): (
        set(),
        {
            ("permute", GUARD, "moe_permute_with_probs", "num_out_tokens"),
            ("permute", GUARD, "moe_permute_with_probs", "inp"),
            ("imports", GUARD, "autocast", "recipe"),
            ("imports", NEEDS, "pytorch", "flash_attn.cute.interface"),
            ("imports", NEEDS, "pytorch", "flash_attn_interface"),
        },
    ),
    # cuDNN older than 9.12.0 raises at import (common/__init__.py:39)
    ("2.19.0", "2.20.2"): (set(), {("imports", NEEDS, "pytorch", "")}),
    # nothing that the bridge consumes changed: a repackaged release, a minor one, a patch
    ("2.6.0", "2.6.0.post1"): (set(), set()),
    ("2.12.0", "2.13.0"): (set(), set()),
    ("2.14.0", "2.14.1"): (set(), set()),
}

# Followed by the bridge itself, or without effect on its calls: told when asked, never cried about.
FOLLOWED = [
    ("2.8.0", "2.9.0", "imports", K.MOVED, "FP8GlobalStateManager"),
    ("2.8.0", "2.9.0", "imports", K.MOVED, "check_fp8_support"),
]


Compare = Callable[[str, str], StaticResult]


@pytest.fixture(scope="module")
def compare(release_of: Callable[[str], Release], bridge_source: Source) -> Compare:
    """Old and new version to what is said; a pair is compared once."""

    @cache
    def pair(old: str, new: str) -> StaticResult:
        return run_pair(release_of(old), release_of(new), bridge_source, tool="test")

    return pair


def rows_of(result: StaticResult, impact: Impact) -> set[Row]:
    found = (f for f in result.findings if f.impact is impact)
    return {(f.module, f.kind, f.symbol.rpartition(".")[2], f.parameter) for f in found}


SECOND_LOOKS = {
    ("1.12.0", "1.13.0"), ("2.1.0", "2.2.0"), ("2.2.0", "2.3.0"), ("2.3.0", "2.2.0"), ("2.5.0", "2.6.0"),
    ("2.8.0", "2.9.0"), ("2.6.0", "2.6.0.post1"), ("2.12.0", "2.13.0"), ("2.14.0", "2.14.1"),
}  # fmt: skip
PAIRS = [pytest.param(*pair, marks=pytest.mark.thorough if pair in SECOND_LOOKS else ()) for pair in CHANGED]


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_what_changed_is_said_and_no_more(old: str, new: str, compare: Compare) -> None:
    breaking, risk = CHANGED[old, new]
    result = compare(old, new)
    assert rows_of(result, Impact.BREAKING) == breaking
    assert rows_of(result, Impact.RISK) == risk


@pytest.mark.parametrize(("old", "new", "module", "kind", "symbol"), FOLLOWED)
def test_what_the_bridge_follows_is_harmless(
    old: str, new: str, module: str, kind: K, symbol: str, compare: Compare
) -> None:
    result = compare(old, new)
    assert (module, kind, symbol, "") in rows_of(result, Impact.HARMLESS)
