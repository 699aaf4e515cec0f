"""The whole layer of kind A: it passes on both paths, and what the vendor's layer may do wrong is caught by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import imports as te  # noqa: E402
from megacpp_validate.bridge import layer_spec as spec  # noqa: E402
from megacpp_validate.diagnosis.checks import CheckKind, read_failed_check  # noqa: E402
from megacpp_validate.native.block import ABlock  # noqa: E402
from megacpp_validate.probes import whole_layer  # noqa: E402
from megacpp_validate.probes.bench import Bench  # noqa: E402
from megacpp_validate.probes.order import Order, Target  # noqa: E402
from megacpp_validate.probes.whole_layer import check_whole_layer  # noqa: E402
from tests.probes.planted_numbers import failed  # noqa: E402

RECIPES = ("delayed", "current", "block")


def run(requested: str, recipes: tuple[str, ...] = (), *, seed: int = 0, quick: bool = False) -> Bench:
    torch.manual_seed(seed)
    target = Target("cpu", "", recipes=recipes)
    bench = Bench(Order("layer_spec", "stack", target, requested, seed=seed, quick=quick))
    check_whole_layer(bench, spec)
    return bench


@pytest.mark.parametrize("quick", [True, False])
def test_the_native_path_passes(quick: bool) -> None:
    for seed in range(5):
        assert failed(run("native", quick=quick, seed=seed)) == set()


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("quick", [True, False])
def test_transformer_engine_passes_in_every_recipe(quick: bool) -> None:
    for seed in range(5):
        bench = run("te", RECIPES, quick=quick, seed=seed)
        assert failed(bench) == set()
    paths = {backend.path for backend in bench.backends}
    assert {"bf16.whole.gqa4", "fp32.whole.gqa4.small", "delayed.whole.gqa4"} <= paths
    assert {backend.claimed for backend in bench.backends} == {"te"}


def made_with(**other: Any) -> Callable[[Any], type]:
    """The vendor's layer, made with something else than was asked for."""

    def change(real: Any) -> type:
        class TransformerLayer(real):  # type: ignore[misc]
            def __init__(self, *given: Any, **named: Any) -> None:
                super().__init__(*given, **{**named, **other})

        return TransformerLayer

    return change


def giving(fault: Callable[[Any, Any], Any]) -> Callable[[Any], type]:
    """The vendor's layer, whose output is `fault(output, rows)`."""

    def change(real: Any) -> type:
        class TransformerLayer(real):  # type: ignore[misc]
            def forward(self, rows: Any) -> Any:
                return fault(super().forward(rows), rows)

        return TransformerLayer

    return change


class _MoreGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 1.02


FORWARD = {"bf16.whole.gqa4.forward", "fp32.whole.gqa4.forward"}
FAULTS: dict[str, tuple[Callable[[Any], type], set[str]]] = {
    "attention dropout": (
        made_with(attention_dropout=0.1),
        {*FORWARD, "bf16.whole.gqa4.forward.repeated", "fp32.whole.gqa4.grad.self_attention.proj.weight"},
    ),
    "hidden dropout": (made_with(hidden_dropout=0.1), {*FORWARD, "fp32.whole.gqa4.forward.repeated"}),
    "a little attention dropout": (made_with(attention_dropout=0.001), {"fp32.whole.gqa4.forward.repeated"}),
    "eps": (made_with(layernorm_epsilon=1e-6), {"bf16.whole.gqa4.small.forward", "fp32.whole.gqa4.small.forward"}),
    "mask": (made_with(self_attn_mask_type="no_mask"), FORWARD),
    "activation": (made_with(activation="geglu"), FORWARD),
    "order of the joint weight": (made_with(qkv_weight_interleaved=False), FORWARD),
    "a residual twice": (giving(lambda out, rows: out + rows), FORWARD),
    "no residual": (giving(lambda out, rows: out - rows), FORWARD),
    "one percent": (giving(lambda out, _: out * 1.01), FORWARD),
    "gradient": (giving(lambda out, _: _MoreGradient.apply(out)), {"bf16.whole.gqa4.grad.rows"}),
    "dtype": (giving(lambda out, _: out.double()), {"bf16.whole.gqa4.dtype"}),
}


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(("change", "caught"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_the_vendors_layer_is_caught(
    change: Callable[[Any], type], caught: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(te.transformer_layer, "_found", (change(te.transformer_layer.require()), ""))
    assert caught <= failed(run("te", ("delayed",)))


@pytest.mark.usefixtures("te_double")
def test_a_layer_that_leaves_the_scope_is_a_silent_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(real: Any) -> type:
        class TransformerLayer(real):  # type: ignore[misc]
            def forward(self, rows: Any) -> Any:
                with te.autocast.require()(enabled=False):
                    return super().forward(rows)

        TransformerLayer.__module__ = real.__module__
        return TransformerLayer

    monkeypatch.setattr(te.transformer_layer, "_found", (change(te.transformer_layer.require()), ""))
    bench = run("te", RECIPES)
    assert {f"{recipe}.whole.gqa4.grad.applied" for recipe in RECIPES} == {
        check.name for check in bench.checks if not check.passed
    }
    read = [read_failed_check("layer_spec", check) for check in bench.checks if not check.passed]
    assert {check.kind for check in read} == {CheckKind.BACKEND}


@pytest.mark.usefixtures("te_double")
def test_a_part_that_is_not_the_vendors_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = te.transformer_layer.require()

    class TransformerLayer(real):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            plain = torch.nn.Linear(64, 64, bias=False, dtype=named["params_dtype"])
            own = plain.forward
            plain.forward = lambda rows, is_first_microbatch=None: own(rows)
            self.self_attention.proj = plain

    TransformerLayer.__module__ = real.__module__
    monkeypatch.setattr(te.transformer_layer, "_found", (TransformerLayer, ""))
    bench = run("te")
    assert "bf16.whole.gqa4.layers" in failed(bench)
    assert next(c for c in bench.checks if c.name == "bf16.whole.gqa4.layers").detail == "not seen: Linear"


@pytest.mark.usefixtures("te_double")
def test_a_layer_with_other_parameters_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = te.transformer_layer.require()
    monkeypatch.setattr(te.transformer_layer, "_found", (made_with(fuse_qkv_params=False)(real), ""))
    assert {"bf16.whole.gqa4.parameters", "delayed.whole.gqa4.parameters"} <= failed(run("te", ("delayed",)))


@pytest.mark.usefixtures("te_double")
def test_a_gradient_that_is_not_there_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real, lost = whole_layer._named, [f"grad.qkv.weight.{part}" for part in ("query", "key", "value")]
    lost.append("grad.out.weight")
    monkeypatch.setattr(whole_layer, "_named", lambda *given: real(*given) | dict.fromkeys(lost))
    found = failed(run("te", quick=True))
    assert {
        f"bf16.whole.gqa4.grad.self_attention.layernorm_qkv.weight.{part}" for part in ("query", "key", "value")
    } <= found
    assert "bf16.whole.gqa4.grad.self_attention.proj.weight" in found


def test_a_fault_of_the_native_block_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ABlock.forward
    monkeypatch.setattr(ABlock, "forward", lambda self, rows: real(self, rows) * 1.01)
    assert "fp32.whole.gqa4.forward" in failed(run("native"))
