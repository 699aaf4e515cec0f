"""The probes of bridge modules pass on both paths, and each planted fault fails the check that is meant for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from megacpp_validate.bridge import attention, expert_gemm, fp8_scope, linear_walker, native_block, permute
from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge import layer_spec as spec
from megacpp_validate.bridge.backends import Choice, Refusal
from megacpp_validate.bridge.features import read_features
from megacpp_validate.bridge.vendor import VendorEntryMissing
from megacpp_validate.native import mamba, recurrent
from megacpp_validate.native import permute as native
from megacpp_validate.native.attention import attention as plain_attention
from megacpp_validate.native.grouped_gemm import grouped_gemm, grouped_gemm_loop
from megacpp_validate.native.norms import RMSNorm
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
)  # fmt: skip

# Module -> what takes its calls where Transformer Engine is not requested.
NATIVE = {
    "attention": "sdpa", "permute": "native", "expert_gemm": "native", "linear_walker": "native",
    "native_block": "native", "layer_spec": "native",
}  # fmt: skip
# Module -> paths that Transformer Engine refuses: masks, one token, widths that FP8 does not take, a block it lacks.
REFUSED = {
    "attention": {f"attention.bf16.gqa4.d64.{case}" for case in ("packed", "window", "soft-cap", "blocks", "one-token")}
    | {"attention.fp32.gqa4.d64.one-token"},
    "expert_gemm": {"expert_gemm"},
    "native_block": {f"native_block.bf16.gqa4.d64.{case}" for case in ("packed", "window")}
    | {f"native_block.fp8.{recipe}.gqa4.d64.odd" for recipe in RECIPES},
    "layer_spec": {"bf16.recurrent"},
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


# --- plants -----------------------------------------------------------------------------------------------------------


def edit(part: str, **changes: Any) -> Plant:
    """Another value of an attribute in one of TE's layers."""

    def make(init: Any) -> Any:
        def made(block: Any, **sizes: Any) -> None:
            init(block, **sizes)
            for name, value in changes.items():
                setattr(getattr(block, part), name, value)

        return made

    return changing(native_block.TeBlock, "__init__", make)


def first(fault: Fault) -> Fault:
    return lambda given: (fault(given[0]), *given[1:])


def unmarked(tensor: Any) -> Any:
    """The same values and no graph of Transformer Engine behind them."""
    return tensor.detach().clone().requires_grad_() if tensor.is_floating_point() else tensor


def leaking(gradient: bool) -> Plant:
    """Padding that leaks into the sums, or into their gradient."""

    def make(real: Any) -> Any:
        def unpad(rows: Any, counts: Any, align: int) -> Any:
            taken = real(rows, counts, align)
            leak = rows.nan_to_num().sum(0) - rows.detach().nan_to_num().sum(0) if gradient else 0 * rows.sum(0)
            return taken + leak if taken.is_floating_point() else taken

        return unpad

    return changing(permute, "unpad_rows", make)


def off_by(number: int) -> Fault:
    def counted(sent: Any) -> Any:
        counts = (sent.rows_per_expert[0] + number, *sent.rows_per_expert[1:])
        return type(sent)(sent.rows, sent.row_probs, counts, sent.tokens_per_expert, sent.row_map)

    return counted


def zero_is_no_padding(real: Any) -> Any:
    return lambda self, payload, probs, kept, count: (
        native.permute(payload, probs, kept) if count else real(self, payload, probs, kept, count)
    )


def mlp_refused(real: Any) -> Any:
    off = Refusal("te", "device", "not today")
    return lambda features, name, device: off if name == "mlp" else real(features, name, device)


def argument(builder: str, **other: Any) -> Plant:
    """A builder that passes something else on."""
    return changing(spec, builder, lambda real: lambda *given, **named: real(*given, **{**named, **other}))


def of_scan(change: Callable[..., Any]) -> Plant:
    return changing(mamba, "ssd_chunked", lambda real: lambda *given, **named: change(partial(real, **named), *given))


def of_recurrence(change: Callable[..., Any]) -> Plant:
    return changing(recurrent, "matrix_recurrence_chunked", lambda real: partial(change, real))


def forget_between(real: Any, x: Any, dt: Any, a: Any, b: Any, c: Any) -> Any:
    parts = [real(x[:, s], dt[:, s], a, b[:, s], c[:, s])[0] for s in (slice(0, 8), slice(8, None))]
    return torch.cat(parts, 1), None


def without(code: str) -> Plant:
    return putting(linear_walker, "EXCLUSIONS", tuple(row for row in linear_walker.EXCLUSIONS if row.code != code))


def lost_siblings(real: Any) -> Any:
    """The known fault: a walk that returns at the first thing it does not swap."""

    def read(root: Any) -> Iterator[Any]:
        stop = False
        for place in real(root):
            if not (place.name.startswith("blocks.1.moe.") and stop):
                stop = stop or place.name == "blocks.1.moe.router"
                yield place

    return read


def building(change: Callable[[Any], object]) -> Plant:
    """Something is done to each layer that is built."""

    def make(real: Any) -> Any:
        def build(linear: Any, name: str) -> Any:
            layer = real(linear, name)
            change(layer)
            return layer

        return build

    return changing(linear_walker, "_build", make)


def opened(patch: Any) -> None:
    patch.setattr(linear_walker, "is_wrapper", lambda _: False)
    patch.setattr(linear_walker, "wraps_child", lambda *_: False)


def faulty(change: Callable[[Any, Any], Any]) -> Plant:
    """Every layer that TE builds calls `change(forward, rows)` instead of its own forward."""

    def make(real: Any) -> Any:
        def faulty_linear(module: Any, *, name: str) -> Any:
            layer = real(module, name=name)
            own = layer.forward
            layer.forward = lambda rows: change(own, rows)
            return layer

        return faulty_linear

    return changing(linear_walker, "te_linear", make)


def without_weight_gradient(forward: Any, rows: Any) -> Any:
    forward.__self__.weight.requires_grad_(False)
    return forward(rows)


def product(rows: Fault = lambda one: one, weights: Fault = lambda one: one) -> Plant:
    """A product in torch of other rows and weights."""
    return putting(expert_gemm, "grouped_gemm", lambda x, w, counts: grouped_gemm(rows(x), weights(w), counts))


def idle_left(gradient: Any) -> Any:
    return torch.where(gradient.abs().sum((1, 2), keepdim=True) == 0, 1.0, gradient)


def looped(self: Any, rows: Any, counts: Any, **_: Any) -> Any:
    return grouped_gemm_loop(rows, torch.stack([self.weight_of(expert) for expert in range(4)]), counts)


def scope_off(real: Any) -> Any:
    return lambda **given: real(**{**given, "features": read_features("off")})


def unfused_groups(patch: Patch) -> None:
    kind = te.dot_product_attention.require()
    fused = kind.is_fused
    patch.setattr(kind, "is_fused", lambda layer, q, k: q.shape[2] == k.shape[2] and fused(layer, q, k))


def steeper_keys(attend: Any) -> Any:
    return lambda q, k, v, **more: attend(q, in_gradient(lambda g: g * 1.01)(k), v, **more)


def without_it(module: Any, name: str) -> Plant:
    """The wrapper says that Transformer Engine refuses every call."""
    return putting(module, name, lambda *_: Refusal("te", "planted", "it does not want to"))


def claiming_te(module: Any) -> Plant:
    return putting(module, "choose", lambda name, candidates: Choice(name, "te", "te", ()))


class Row(NamedTuple):
    """A fault under the probe of a module, and the checks that must fail, with * and ?."""

    module: str
    plant: Plant
    wanted: set[str]


ON_NATIVE = {
    "attention, gradient x1.01": Row(
        "attention", putting(attention, "native_attention", steeper_keys(plain_attention)), {"bf16*.grad.key"}
    ),
    "attention, false claim": Row("attention", claiming_te(attention), {"attention.*.backend"}),
    "permute, bytes rounded": Row(
        "permute", after(permute, "permute", first(lambda rows: rows & 0xFE if rows.dtype == torch.uint8 else rows)),
        {"float8_e4m3fn.jagged.rows"},
    ),
    "permute, padding leaks backward": Row("permute", leaking(True), {"bf16.aligned.back.grad.rows"}),
    "permute, one more": Row("permute", after(permute.Dispatch, "permute", off_by(1)), {"bf16.one-token.counts"}),
    "permute, zero is no padding": Row(
        "permute", changing(permute.Dispatch, "_native_permute", zero_is_no_padding), {"bf16.zero-probability.rows"}
    ),
    "experts, idle gradients left": Row(
        "expert_gemm", product(weights=in_gradient(idle_left)), {"bf16.middle-idle.grad.weight1"}
    ),
    "experts, a weight without a gradient": Row(
        "expert_gemm", product(weights=lambda weights: weights.detach()), {"bf16.middle-idle.grad.weight0"}
    ),
}  # fmt: skip
BY_TE = {
    "attention, fallback": Row("attention", without_it(attention.Attention, "_why_not_te"),
                               {"attention.fp32.*.backend"}),
    "attention, grouped queries unfused": Row("attention", unfused_groups, {"bf16.gqa4.d64.odd.kernel.backend"}),
    "permute, fallback": Row(
        "permute", without_it(permute, "why_not_te"),
        {"bf16.top2.dropped.permute.bf16.top2.dropped.backend", "float8_e4m3fn.jagged.claimed"},
    ),
    "permute, false claim there": Row("permute", after(permute, "te_permute", first(unmarked)), {"*backend"}),
    "experts, false claim": Row("expert_gemm", putting(expert_gemm.TeExpertBank, "forward", looped),
                                {"fp32.middle-idle.expert_gemm.fp32.middle-idle.backend"}),
    "experts, FP8 that is not computed in": Row(
        "expert_gemm", changing(fp8_scope, "low_precision", scope_off),
        {f"fp8.current.middle-idle.{name}.rounded" for name in ("forward", "grad.rows")},
    ),
    "block, another dtype": Row("native_block", after(native_block.TeBlock, "forward", lambda x: x.double()),
                                {"bf16.gqa1.d64.gelu.dtype"}),
    "block, keys as values": Row(
        "native_block", edit("qkv", weight_names=["query_weight", "value_weight", "key_weight"]),
        {"bf16.gqa1.d64.gelu.forward"},
    ),
    "block, fallback": Row("native_block", without_it(native_block, "_why_not_of_te"),
                           {"native_block.bf16.*.backend"}),
    "spec, another class": Row(
        "layer_spec", changing(spec, "te_layer_spec", lambda real: lambda *given: {**real(*given), "norm": RMSNorm}),
        {"spec.te.norm"},
    ),
    "spec, fallback": Row("layer_spec", changing(spec, "why_not_te", mlp_refused),
                          {"spec.chosen.MLP", "fp32.mlp.gelu.backend"}),
    "spec, a chunk forgotten": Row("layer_spec", of_scan(forget_between), {"bf16.mixer.forward"}),
    "spec, queries of the row before": Row(
        "layer_spec", of_recurrence(lambda real, q, *rest, **named: real(q.roll(1, 1), *rest, **named)),
        {"bf16.recurrent.forward"},
    ),
    "spec, attention of another shape": Row("layer_spec", argument("te_attention_layer", num_gqa_groups=4),
                                            {"*.whole.*.parameters"}),
    "walker, router": Row("linear_walker", without("moe-router"), {"plan.blocks.1.moe.gate"}),
    "walker, wrapper opened": Row("linear_walker", opened, {"plan.blocks.0.attn.v_proj.base_layer"}),
    "walker, alignment": Row("linear_walker", putting(linear_walker, "_by_numbers", lambda *_: None),
                             {"plan.alignment"}),
    "walker, siblings lost": Row("linear_walker", changing(linear_walker, "read_places", lost_siblings),
                                 {"swap.blocks.1.moe.experts.0.w1"}),
    "walker, checkpoints": Row(
        "linear_walker", building(lambda layer: layer.register_buffer("scale", torch.ones(1))),
        {"swap.state-dict", "swap.loads-native"},
    ),
    "walker, weight without a gradient": Row("linear_walker", faulty(without_weight_gradient),
                                             {"bf16.bias.grad.weight", "current.bias.grad.weight"}),
}  # fmt: skip


def judge(bench: Bench) -> None:
    module = import_module(f"megacpp_validate.probes.{bench.order.probe}")
    module.probe(bench)
    if hasattr(module, "probe_last"):
        module.probe_last(bench)


@pytest.mark.parametrize("row", ON_NATIVE.values(), ids=ON_NATIVE)
def test_a_fault_of_the_native_path_is_caught(row: Row) -> None:
    check_caught(new_bench(row.module), judge, row.plant, row.wanted)


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("row", BY_TE.values(), ids=BY_TE)
def test_a_fault_of_the_path_by_te_is_caught(row: Row) -> None:
    check_caught(new_bench(row.module, "te", ("current",)), judge, row.plant, row.wanted)
