"""The layer spec's probe: it passes on both paths as they are, and every planted fault fails a check by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import imports as te  # noqa: E402
from megacpp_validate.bridge import layer_spec as spec  # noqa: E402
from megacpp_validate.bridge.backends import Refusal  # noqa: E402
from megacpp_validate.bridge.vendor import VendorEntryMissing  # noqa: E402
from megacpp_validate.native import mamba, recurrent  # noqa: E402
from megacpp_validate.native.mlp import NormMLP  # noqa: E402
from megacpp_validate.native.norms import NormLinear, RMSNorm  # noqa: E402
from megacpp_validate.probes import layer_spec as module  # noqa: E402
from megacpp_validate.probes.bench import Bench  # noqa: E402
from megacpp_validate.probes.layer_spec import probe  # noqa: E402
from megacpp_validate.probes.references import layers as reference  # noqa: E402
from megacpp_validate.probes.trial import reference_pass  # noqa: E402
from tests.probes.planted_numbers import RECIPES, VALUES, failed, in_gradient, new_bench, run_probe  # noqa: E402

Fault = Callable[[Any], Any]
Plant = Callable[[pytest.MonkeyPatch], None]


run = partial(run_probe, module)


@pytest.fixture
def without_native_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are a third of a run, `test_native_layers` plants their faults, and no fault is looked for there."""
    monkeypatch.setattr(module, "check_native_layers", lambda bench: None)


@pytest.mark.parametrize("quick", [True, False])
def test_the_native_path_passes(quick: bool) -> None:
    bench = run("native", quick=quick)
    assert failed(bench) == set()
    assert len(bench.checks) > 120
    assert {backend.claimed for backend in bench.backends} == {"native"}


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("quick", [True, False])
def test_transformer_engine_passes_in_every_recipe(quick: bool) -> None:
    bench = run("te", RECIPES, quick=quick)
    assert failed(bench) == set()
    natively = {backend.path for backend in bench.backends if backend.claimed == "native"}
    assert natively == ({"bf16.recurrent"} if quick else {"fp32.recurrent", "bf16.recurrent"})
    assert len({backend.path for backend in bench.backends}) == len(bench.backends)
    names = {check.name for check in bench.checks}
    for recipe in RECIPES:
        assert {f"{recipe}.in_projection.forward", f"{recipe}.mlp.swiglu.grad.fc1_weight"} <= names


@pytest.mark.usefixtures("te_double")
def test_attention_that_cannot_run_is_met_after_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("cuDNN: set_attribute on a reshape operation")

    monkeypatch.setattr(te.dot_product_attention.require(), "forward", broken)
    bench = new_bench("layer_spec", "te", RECIPES)
    with pytest.raises(RuntimeError, match="reshape"):
        probe(bench)
    assert failed(bench) == set()
    assert {"block.mlp.gelu.forward", "bf16.experts.forward"} <= {check.name for check in bench.checks}


def test_te_requested_and_not_there_is_no_pass() -> None:
    with pytest.raises(VendorEntryMissing):
        run("te")


@pytest.mark.usefixtures("te_double")
def test_a_recipe_without_a_reference_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "recipes", ("nvfp4",))  # the double has no such GPU
    assert failed(run("te", ("nvfp4",))) == {"nvfp4.reference"}


# --- faults of the table ----------------------------------------------------------------------------------------------


def replaced(module: Any, name: str, value: Any) -> Plant:
    return lambda patch: patch.setattr(module, name, value)


def other_class(patch: pytest.MonkeyPatch) -> None:
    real = spec.te_layer_spec
    patch.setattr(spec, "te_layer_spec", lambda *given: {**real(*given), "norm": RMSNorm})


def one_global_switch(patch: pytest.MonkeyPatch) -> None:
    real = spec.te_layer_spec

    def table(features: Any = spec.PRODUCTION) -> dict[str, Any]:
        found = real(features)
        return found if None not in (found["MLP"], found["norm"]) else dict.fromkeys(found)

    patch.setattr(spec, "te_layer_spec", table)


def fallback(patch: pytest.MonkeyPatch) -> None:
    """The MLP is native, and says so."""
    real = spec.why_not_te
    off = Refusal("te", "device", "not today")
    patch.setattr(
        spec, "why_not_te", lambda features, name, device: off if name == "mlp" else real(features, name, device)
    )


def silent_fallback(patch: pytest.MonkeyPatch) -> None:
    """The MLP is native, and says that it is by TE."""

    def build(hidden: int, ffn_hidden: int, **made: Any) -> Any:
        return NormMLP(hidden, ffn_hidden, **made)

    patch.setattr(spec, "te_mlp", build)


def lost_kind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(spec, "FEATURE_OF", {kind: name for kind, name in spec.FEATURE_OF.items() if kind != "MLP"})


TABLES: dict[str, tuple[Plant, set[str]]] = {
    "another class": (other_class, {"spec.te.norm"}),
    "one switch for all": (one_global_switch, {"spec.flag.mlp", "spec.flag.norm"}),
    "flags ignored": (replaced(spec, "why_not_te", lambda *_: None), {"spec.flag.mlp.native"}),
    "kind lost": (lost_kind, {"spec.chosen.MLP", "bf16.mlp.swiglu.backend"}),
    "fallback": (fallback, {"spec.chosen.MLP", "fp32.mlp.gelu.backend"}),
    "silent fallback": (silent_fallback, {"fp32.mlp.gelu.backend", "bf16.mlp.swiglu.backend"}),
    "no alignment": (replaced(spec, "_why_not_aligned", lambda *_: None), {"alignment"}),
    "any dtype": (replaced(spec, "_check_dtype", lambda *_: None), {"refuses.dtype"}),
    "first values": (replaced(spec, "take_over", lambda layer, plain, name: layer), {"checkpoints.mixer.first-values"}),
    "checkpoints": (replaced(spec, "keep_checkpoints_plain", torch.nn.Sequential), {"checkpoints.norm"}),
}


@pytest.mark.usefixtures("te_double", "without_native_layers")
@pytest.mark.parametrize(("plant", "caught"), TABLES.values(), ids=TABLES)
def test_a_planted_fault_of_the_table_is_caught(
    plant: Plant, caught: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    bench = new_bench("layer_spec", "te")
    try:
        probe(bench)
    except (AttributeError, KeyError):  # where a fault breaks what comes later, what was seen before it counts
        assert caught & failed(bench)
    found = failed(bench)
    assert all(any(name.endswith(wanted) for name in found) for wanted in caught)


# --- faults of numbers ------------------------------------------------------------------------------------------------


BUILDERS = {"te_norm": "norm.unit", "te_mlp": "mlp.swiglu", "te_mamba_in_projection": "in_projection"}


def faulty(patch: pytest.MonkeyPatch, builder: str, change: Callable[[Any, Any], Any]) -> None:
    """What TE builds calls `change(forward, rows)` instead of its own forward."""
    real = getattr(spec, builder)

    def build(*given: Any, **named: Any) -> Any:
        layer = real(*given, **named)
        own = layer.forward
        layer.forward = lambda rows: change(own, rows)
        return layer

    patch.setattr(spec, builder, build)


@pytest.mark.thorough
@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("part", ["forward", "grad.input"])
@pytest.mark.parametrize("fault", VALUES.values(), ids=VALUES)
def test_a_wrong_value_is_caught(fault: Fault, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for builder in BUILDERS:
        if part == "forward":
            faulty(monkeypatch, builder, lambda forward, rows: fault(forward(rows)))
        else:
            faulty(monkeypatch, builder, lambda forward, rows: forward(in_gradient(fault)(rows)))
    found = failed(run("te", ("delayed",)))
    for path in BUILDERS.values():
        assert {f"fp32.{path}.{part}", f"bf16.{path}.{part}"} <= found
    if fault is not VALUES["x1.01"]:  # less than FP8 itself is off by
        assert {f"delayed.mlp.swiglu.{part}", f"delayed.in_projection.{part}"} <= found


def argument(builder: str, **other: Any) -> Plant:
    """A builder that passes something else on."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = getattr(spec, builder)
        patch.setattr(spec, builder, lambda *given, **named: real(*given, **{**named, **other}))

    return plant


def layer_norm(patch: pytest.MonkeyPatch) -> None:
    """The in-projection takes the mean away."""
    faulty(patch, "te_mamba_in_projection", lambda forward, rows: forward(rows - rows.mean(-1, keepdim=True)))


def of_scan(change: Callable[..., Any]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        real = mamba.ssd_chunked
        patch.setattr(mamba, "ssd_chunked", lambda *given, **named: change(real, given, named))

    return plant


def of_recurrence(change: Callable[..., Any]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        real = recurrent.matrix_recurrence_chunked
        patch.setattr(recurrent, "matrix_recurrence_chunked", lambda *given, **named: change(real, given, named))

    return plant


def half_decay(real: Any, given: Any, named: Any) -> Any:
    x, dt, a, b, c = given
    return real(x, dt, a * 0.5, b, c, **named)


def forget_between(real: Any, given: Any, named: Any) -> Any:
    x, dt, a, b, c = given
    parts = [real(x[:, s], dt[:, s], a, b[:, s], c[:, s], **named)[0] for s in (slice(0, 8), slice(8, None))]
    return torch.cat(parts, 1), None


def swap_directions(real: Any, given: Any, named: Any) -> Any:
    x, dt, a, b, c = given
    return real(x, dt, a, c, b, **named)


def late_queries(real: Any, given: Any, named: Any) -> Any:
    return real(given[0].roll(1, 1), *given[1:], **named)


def keep_more(real: Any, given: Any, named: Any) -> Any:
    return real(*given[:4], given[4] + 1.0, **named)


def other_gate(patch: pytest.MonkeyPatch) -> None:
    real = spec.te_mlp

    def build(*given: Any, activation: Any, **named: Any) -> Any:
        return real(*given, activation="geglu" if activation == "swiglu" else activation, **named)

    patch.setattr(spec, "te_mlp", build)


def gates_of_another_row(patch: pytest.MonkeyPatch) -> None:
    real = mamba.Mamba2Mixer._gated_norm
    patch.setattr(mamba.Mamba2Mixer, "_gated_norm", lambda self, y, gate: real(self, y, gate.roll(1, 1)))


LAYERS: dict[str, tuple[Plant, set[str]]] = {
    "norm's eps": (argument("te_norm", eps=1e-6), {"fp32.norm.small.forward", "bf16.norm.small.forward"}),
    "mlp's eps": (argument("te_mlp", eps=1e-6), {"fp32.mlp.gelu.forward", "bf16.mlp.gelu.forward"}),
    "projection's eps": (argument("te_mamba_in_projection", eps=1e-6), {"bf16.in_projection.forward"}),
    "mlp's activation": (other_gate, {"bf16.mlp.swiglu.forward"}),
    "projection's norm": (layer_norm, {"fp32.in_projection.forward", "bf16.mixer.forward"}),
    "decays half as fast": (of_scan(half_decay), {"bf16.mixer.forward", "bf16.mixer.grad.a_log"}),
    "a chunk forgotten": (of_scan(forget_between), {"bf16.mixer.forward", "bf16.mixer.grad.input"}),
    "b and c swapped": (of_scan(swap_directions), {"bf16.mixer.forward"}),
    "gate of another row": (gates_of_another_row, {"bf16.mixer.forward"}),
    "queries of the row before": (of_recurrence(late_queries), {"bf16.recurrent.forward"}),
    "forget gate open": (of_recurrence(keep_more), {"bf16.recurrent.forward", "bf16.recurrent.grad.forget_bias"}),
}


@pytest.mark.usefixtures("te_double", "without_native_layers")
@pytest.mark.parametrize(("plant", "caught"), LAYERS.values(), ids=LAYERS)
def test_a_faulty_layer_is_caught(plant: Plant, caught: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert caught <= failed(run("te"))


@pytest.mark.usefixtures("te_double", "without_native_layers")
def test_an_attention_layer_of_another_shape_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    argument("te_attention_layer", num_gqa_groups=4)(monkeypatch)
    assert "A.parameters" in failed(run("te"))
    argument("te_attention_layer", num_gqa_groups=2, dtype=torch.float32)(monkeypatch)
    assert "A.dtype" in failed(run("te"))


# --- the references themselves ----------------------------------------------------------------------------------------


def test_the_references_agree_with_the_native_layers_in_fp64() -> None:
    torch.manual_seed(0)
    double: dict[str, Any] = {"dtype": torch.float64}
    mixer = {"state": 8, "head_dim": 8, "groups": 2}
    block = {"key_dim": 8, "value_dim": 16}
    cases: list[tuple[Any, Any]] = [
        (RMSNorm(32, **double), lambda given: reference.rms_norm(given["input"], given["weight"], 1e-5)),
        (NormLinear(32, 48, **double), lambda given: reference.norm_linear(given, 1e-5)),
        (NormMLP(32, 48, **double), lambda given: reference.mlp(given, activation="swiglu", eps=1e-5)),
        (
            NormMLP(32, 48, activation="gelu", **double),
            lambda given: reference.mlp(given, activation="gelu", eps=1e-5),
        ),
        (
            mamba.Mamba2Mixer(32, chunk=8, **mixer, **double),
            lambda given: reference.mamba_mixer(given, **mixer, eps=1e-5),
        ),
        (
            recurrent.MatrixRecurrentBlock(32, num_heads=2, chunk=8, **block, **double),
            lambda given: reference.recurrent_block(given, heads=2, **block, eps=1e-5),
        ),
    ]
    for layer, function in cases:
        with torch.no_grad():
            for value in layer.parameters():
                value.add_(torch.randn_like(value) * 0.2)
        rows = torch.randn(2, 19, 32, dtype=torch.float64, requires_grad=True)
        out = layer(rows)
        gradient = torch.randn_like(out)
        out.backward(gradient)
        parameters = dict(layer.named_parameters())
        wanted, _ = reference_pass(function, {"input": rows, **parameters}, gradient, reference.EXPANDED)
        torch.testing.assert_close(out, wanted.pop("forward"), rtol=0, atol=1e-12)
        for name, value in wanted.items():
            seen = rows.grad if name == "grad.input" else parameters[name.removeprefix("grad.")].grad
            torch.testing.assert_close(seen, value, rtol=0, atol=1e-11, msg=f"{type(layer).__name__}.{name}")
