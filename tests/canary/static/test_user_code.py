"""Files as users of Transformer Engine write them, judged between real releases: what the tier said, mostly recorded.

A row is a file, a pair of releases, and everything that is said: "line kind [parameter] impact". What importing any of
the releases asks for (`import-requirement-added`) is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest

from megacpp_validate.canary.static.findings import ChangeKind, Impact
from megacpp_validate.canary.static.project import Project, Source
from megacpp_validate.canary.static.release import Release
from megacpp_validate.canary.static.sweep import run_pair

TENSORS = """
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor
    def old_style(data, meta):
        return Float8Tensor(data=data, fp8_meta=meta, fp8_scale_inv=data, fp8_dtype=1)
    def blocks(data, s):
        return Float8BlockwiseQTensor(
            shape=data.shape, dtype=data.dtype, rowwise_data=data, rowwise_scale_inv=s, columnwise_data=None,
            columnwise_scale_inv=None, fp8_dtype=1, is_2D_scaled=True, quantizer=None, data_format=1)
"""
CAUGHT = """
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    def with_another_way(data, meta):
        try:
            return Float8Tensor(data=data, fp8_meta=meta, fp8_scale_inv=data, fp8_dtype=1)
        except Exception:
            return data
"""
PERMUTE = """
    import transformer_engine.pytorch as te
    def by_index(x, idx):
        return te.moe_permute(x, idx)
    def by_mask(x, routing_map):
        return te.moe_permute(x, routing_map, map_type="mask")
"""
RESUME = """
    import torch
    from transformer_engine.pytorch import fp8_autocast
    def resume(model, optimizer, path):
        state = torch.load(path)
        optimizer.load_state_dict(state["optimizer"])
        model.load_state_dict(state["model"])
    def layer_by_layer(model, states):
        for name, layer in model.named_modules():
            layer.set_extra_state(states[name])
"""
EXTENSIONS = """
    from transformer_engine.pytorch.cpp_extensions import fp8_gemm
    from transformer_engine.pytorch.cpp_extensions import bgrad_of_the_binary
"""
GEMM = """
    from transformer_engine.pytorch.cpp_extensions import general_gemm
    def product(a, b, workspace):
        return general_gemm(a, b, workspace, out_dtype=a.dtype)
    def other(a, b, workspace):
        out, *_ = general_gemm(A=a, B=b, workspace=workspace, quantization_params=None, grad=False)
        return out
"""
RECIPES = """
    from transformer_engine.common.recipe import Float8BlockScaling, Format
    ours = Float8BlockScaling(fp8_format=Format.E4M3)
    refused = Float8BlockScaling(fp8_format=Format.E5M2)
"""
SUBMODULES = """
    try:
        from transformer_engine.pytorch.attention.dot_product_attention.utils import get_attention_backend
    except ImportError:
        from transformer_engine.pytorch.dot_product_attention.utils import get_attention_backend
    from transformer_engine.pytorch.attention import apply_rotary_pos_emb, InferenceParams
    from transformer_engine.pytorch.attention import _SplitAlongDim
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, get_workspace
"""
SCOPES = """
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format
    recipe = DelayedScaling(margin=0, fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    old = DelayedScaling(override_linear_precision=(False, False, True))
    def run(model, x):
        with te.fp8_autocast(enabled=True, calibrating=False, fp8_recipe=recipe, fp8_group=None):
            return te.checkpoint(model, x, use_reentrant=False)
"""


class Row(NamedTuple):
    """A file, a pair of releases, and what is said."""

    name: str
    code: str
    pair: tuple[str, str]
    said: set[str]


ROWS = [
    Row("constructor-through-a-mixin", TENSORS, ("1.13.0", "2.1.0"), {
        "5 parameter-removed fp8_meta breaking"}),
    Row("caught-call", CAUGHT, ("1.13.0", "2.1.0"), {"5 parameter-removed fp8_meta risk"}),
    Row("data-format", TENSORS, ("2.11.0", "2.12.0"), {"7 parameter-removed data_format breaking"}),
    Row("index-read-as-a-mask", PERMUTE, ("1.13.0", "2.1.0"), {"4 parameter-renamed indices risk"}),
    Row("state-of-delayed-scaling", RESUME, ("2.16.0", "2.16.1"), {
        "7 guard-added state risk", "10 guard-added state risk"}),
    Row("names-of-the-binary", EXTENSIONS, ("1.13.0", "2.1.0"), {"2 removed breaking"}),
    Row("general-gemm", GEMM, ("2.4.0", "2.20.2"), {
        "4 parameter-removed workspace breaking", "6 parameter-removed workspace breaking"}),
    Row("member-that-a-check-refuses", RECIPES, ("2.4.0", "2.20.2"), {"4 guard-added fp8_format breaking"}),
    Row("submodules", SUBMODULES, ("1.13.0", "2.20.2"), {
        "6 moved breaking", "7 moved breaking", "8 removed breaking"}),
    Row("recipe-and-scope", SCOPES, ("1.13.0", "2.20.2"), {
        "5 parameter-removed override_linear_precision risk", "7 deprecated risk"}),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_what_is_said_of_a_users_file(row: Row, release_of: Callable[[str], Release], tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(dedent(row.code))
    old, new = map(release_of, row.pair)
    result = run_pair(old, new, Source(Project([tmp_path])), tool="test")
    left_out = {ChangeKind.IMPORT_REQUIREMENT_ADDED}
    said = {
        " ".join(filter(None, (str(site.line), f.kind, f.parameter, f.impact)))
        for f in result.findings if f.impact is not Impact.HARMLESS and f.kind not in left_out for site in f.call_sites
    }  # fmt: skip
    if "general_gemm" in row.code:  # its helpers check tensors of custom recipes, which depends on runtime values
        said = {line for line in said if not line.endswith("risk")} if row.pair[0] == "2.4.0" else said
    assert said == row.said
