"""The probes of bridge modules pass on both paths, and each planted fault fails the check that is meant for it."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from megacpp_validate.bridge import expert_gemm, fp8_scope, linear_walker, native_block, permute
from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.backends import Refusal
from megacpp_validate.bridge.features import read_features
from megacpp_validate.bridge.vendor import VendorEntryMissing
from megacpp_validate.native import permute as native
from megacpp_validate.native.grouped_gemm import grouped_gemm
from megacpp_validate.probes.attention import REFUSED as ATTENTION_REFUSED
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.linear_walker import EXPECTED, hybrid_tree
from tests.probes.planting import (
    RECIPES,
    Fault,
    Patch,
    Plant,
    after,
    changing,
    check_caught,
    failed,
    in_gradient,
    new_bench,
    putting,
    run_probe,
)

# Module -> what takes its calls where Transformer Engine is not requested.
NATIVE = {
    "attention": "sdpa", "permute": "native", "expert_gemm": "native", "linear_walker": "native",
    "native_block": "native", "layer_spec": "native",
}  # fmt: skip
# Module -> paths that Transformer Engine refuses: masks, one token, widths that FP8 does not take, a layer it lacks.
REFUSED = {
    "attention": {f"attention.bf16.{case.name}" for case in ATTENTION_REFUSED}
    | {f"attention.{dtype}.gqa4.d64.one-token" for dtype in ("fp32", "bf16")},
    "expert_gemm": {"expert_gemm"},
    "native_block": {f"native_block.bf16.gqa4.d64.{case}" for case in ("packed", "window")}
    | {f"native_block.fp8.{recipe}.gqa4.d64.odd" for recipe in RECIPES},
    "layer_spec": {"bf16.recurrent", "fp32.head_loss", "bf16.head_loss"},
}


def run(module: str, *given: Any, **more: Any) -> Bench:
    return run_probe(import_module(f"megacpp_validate.probes.{module}"), *given, **more)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("module", NATIVE)
def test_the_native_path_passes(module: str, quick: bool) -> None:
    bench = run(module, quick=quick)
    assert failed(bench) == set()
    assert {row.claimed for row in bench.backends} == {NATIVE[module]}


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("module", NATIVE)
def test_te_passes_in_every_recipe_and_is_seen(module: str) -> None:
    bench = run(module, "te", RECIPES)
    assert failed(bench) == set()
    assert {row.path for row in bench.backends if row.claimed != "te"} == REFUSED.get(module, set())
    assert all(("te" in row.observed) is (row.claimed == "te") for row in bench.backends)


def test_te_requested_and_not_there_is_no_pass() -> None:
    assert {"swap.tied.fc1", "fp32.bias.backend"} <= failed(run("linear_walker", "te"))
    with pytest.raises(VendorEntryMissing):
        run("layer_spec", "te")


@pytest.mark.usefixtures("te_double")
def test_attention_that_cannot_run_is_met_after_everything_else(monkeypatch: Patch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("cuDNN: set_attribute on a reshape operation")

    monkeypatch.setattr(te.dot_product_attention.require(), "forward", broken)
    bench = new_bench("layer_spec", "te", RECIPES)
    with pytest.raises(RuntimeError, match="reshape"):
        import_module("megacpp_validate.probes.layer_spec").probe(bench)
    assert failed(bench) == set()
    assert {"block.mlp.gelu.forward", "bf16.experts.forward"} <= {check.name for check in bench.checks}


@pytest.mark.usefixtures("te_double")
def test_rows_that_are_not_padded_are_an_error(monkeypatch: Patch) -> None:
    monkeypatch.setattr(expert_gemm, "te_state", lambda: {"enabled": False})
    with pytest.raises(ValueError, match="multiples of 16"):
        run("expert_gemm", "te", ("current",))


def test_the_tree_holds_every_exclusion() -> None:
    codes = {row.code for row in linear_walker.EXCLUSIONS} | {"wraps-linear", "tied-embedding", "hooks", "not-listed"}
    assert codes | {"listed"} == set(EXPECTED.values())
    modules = dict(hybrid_tree("cpu").named_modules(remove_duplicate=False))
    assert {name for name, module in modules.items() if isinstance(module, nn.Linear)} <= set(EXPECTED)


# --- plants: what the mutants of the selftest do not plant ------------------------------------------------------------


def first(fault: Fault) -> Fault:
    return lambda given: (fault(given[0]), *given[1:])


def unmarked(tensor: Any) -> Any:
    """The same values and no graph of Transformer Engine behind them."""
    return tensor.detach().clone().requires_grad_() if tensor.is_floating_point() else tensor


def leaking(real: Any) -> Any:
    """The gradient of padding leaks into that of the rows."""

    def unpad(rows: Any, counts: Any, align: int) -> Any:
        taken = real(rows, counts, align)
        leak = rows.nan_to_num().sum(0) - rows.detach().nan_to_num().sum(0)
        return taken + leak if taken.is_floating_point() else taken

    return unpad


def one_more(sent: Any) -> Any:
    counts = (sent.rows_per_expert[0] + 1, *sent.rows_per_expert[1:])
    return type(sent)(sent.rows, sent.row_probs, counts, sent.tokens_per_expert, sent.row_map)


def zero_is_no_padding(real: Any) -> Any:
    return lambda self, payload, probs, kept, count: (
        native.permute(payload, probs, kept) if count else real(self, payload, probs, kept, count)
    )


def with_a_buffer(layer: Any) -> Any:
    layer.register_buffer("scale", torch.ones(1))
    return layer


def idle_left(gradient: Any) -> Any:
    return torch.where(gradient.abs().sum((1, 2), keepdim=True) == 0, 1.0, gradient)


def scope_off(real: Any) -> Any:
    return lambda **given: real(**{**given, "features": read_features("off")})


class Row(NamedTuple):
    """A fault under the probe of a module, and the checks that must fail, with * and ?."""

    module: str
    requested: str
    plant: Plant
    wanted: set[str]


PLANTS = {
    "bytes rounded": Row(
        "permute", "native",
        after(permute, "permute", first(lambda rows: rows & 0xFE if rows.dtype == torch.uint8 else rows)),
        {"float8_e4m3fn.jagged.rows"},
    ),
    "padding leaks backward": Row(
        "permute", "native", changing(permute, "unpad_rows", leaking), {"bf16.aligned.back.grad.rows"},
    ),
    "one more": Row(
        "permute", "native", after(permute.Dispatch, "permute", one_more), {"bf16.one-token.counts"},
    ),
    "zero is no padding": Row(
        "permute", "native", changing(permute.Dispatch, "_native_permute", zero_is_no_padding),
        {"bf16.zero-probability.rows"},
    ),
    "idle gradients left": Row(
        "expert_gemm", "native",
        putting(expert_gemm, "grouped_gemm", lambda x, w, counts: grouped_gemm(x, in_gradient(idle_left)(w), counts)),
        {"bf16.middle-idle.grad.weight1"},
    ),
    "fallback": Row(
        "permute", "te", putting(permute, "why_not_te", lambda *_: Refusal("te", "planted", "it does not want to")),
        {"bf16.top2.dropped.permute.bf16.top2.dropped.backend", "float8_e4m3fn.jagged.claimed"},
    ),
    "false claim": Row("permute", "te", after(permute, "te_permute", first(unmarked)), {"*backend"}),
    "FP8 that is not computed in": Row(
        "expert_gemm", "te", changing(fp8_scope, "low_precision", scope_off),
        {f"fp8.current.middle-idle.{name}.rounded" for name in ("forward", "grad.rows")},
    ),
    "another dtype": Row(
        "native_block", "te", after(native_block.TeBlock, "forward", lambda x: x.double()),
        {"bf16.gqa1.d64.gelu.dtype"},
    ),
    "checkpoints": Row(
        "linear_walker", "te", after(linear_walker, "_build", with_a_buffer),
        {"swap.state-dict"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", PLANTS.values(), ids=PLANTS)
def test_a_fault_is_caught(request: pytest.FixtureRequest, row: Row) -> None:
    if row.requested == "te":
        request.getfixturevalue("te_double")
    probe = import_module(f"megacpp_validate.probes.{row.module}").probe
    recipes = ("current",) if row.requested == "te" else ()
    check_caught(new_bench(row.module, row.requested, recipes), probe, row.plant, row.wanted)
