"""Each layer of a block is seen to compute in low precision: one that does not, forward or backward, is named."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import imports as te  # noqa: E402
from megacpp_validate.diagnosis.checks import CheckKind, FailedCheck, read_failed_check  # noqa: E402
from megacpp_validate.probes import native_block as probe  # noqa: E402
from megacpp_validate.probes.bench import Bench  # noqa: E402
from megacpp_validate.probes.low_precision import (  # noqa: E402
    check_layers_in_low_precision,
    watching_layers,
)
from megacpp_validate.probes.native_block import layer_trial, new_layer, new_sample  # noqa: E402
from megacpp_validate.probes.order import Order, Target  # noqa: E402

Patch = pytest.MonkeyPatch
RECIPES = ("delayed", "current", "block")
KINDS = {"qkv": "layernorm_linear", "out": "linear", "mlp": "layernorm_mlp"}
pytestmark = pytest.mark.usefixtures("te_double")


def judge(recipe: str = "current") -> Bench:
    """One step of the block, and what is said of its layers."""
    target = Target("cpu", "", recipes=RECIPES, production_recipe="delayed")
    bench = Bench(Order("native_block", "stack", target, "te", quick=True))
    sample = new_sample(bench, probe.GATED, torch.bfloat16, branches=0.5)
    layer = new_layer(bench, bench.bridge(), sample)
    for _ in range(2):
        with watching_layers(probe._low_layers(layer)) as watched:
            layer_trial("", layer, sample, enter=bench.low_precision(recipe)).run()
    check_layers_in_low_precision(bench, "fp8", recipe, watched)  # type: ignore[arg-type]
    return bench


def failed(bench: Bench) -> dict[str, FailedCheck]:
    return {check.name: read_failed_check("native_block", check) for check in bench.checks if not check.passed}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_layer_is_seen(recipe: str) -> None:
    bench = judge(recipe)
    assert failed(bench) == {}
    parts = {check.name: {part.name for part in check.parts} for check in bench.checks}
    both = {"forward", "grad.input"}
    assert parts == {
        "fp8.qkv.layers": both | {"grad.query_weight", "grad.key_weight", "grad.value_weight"},
        "fp8.out.layers": both | {"grad.weight"},
        "fp8.mlp.layers": both | {"grad.fc1_weight", "grad.fc2_weight"},
    }
    assert all(part.at_least for check in bench.checks for part in check.parts)


@pytest.mark.parametrize("layer", KINDS)
def test_a_layer_in_bf16_is_named(monkeypatch: Patch, layer: str) -> None:
    kind = getattr(te, KINDS[layer]).require()
    start = kind.start
    monkeypatch.setattr(kind, "start", lambda self, *given: (None, start(self, *given)[1]))
    found = failed(judge("block"))
    assert found.keys() == {f"fp8.{layer}.layers"}
    check = found[f"fp8.{layer}.layers"]
    assert check.kind is CheckKind.BACKEND
    assert check.entries == frozenset({KINDS[layer]})


def test_a_backward_pass_in_bf16_is_seen(monkeypatch: Patch) -> None:
    from transformer_engine.pytorch.linear import _LayerNormLinear

    real = _LayerNormLinear.forward

    def forward(ctx: Any, rows: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        out = real(ctx, rows, weight, bias, *rest)
        ctx.rounder = None
        ctx.save_for_backward(rows, weight, bias)
        return out

    monkeypatch.setattr(_LayerNormLinear, "forward", staticmethod(forward))
    bench = judge()
    assert failed(bench).keys() == {"fp8.qkv.layers"}
    wrong = {part.name for part in bench.checks[0].parts if not part.passed}
    assert wrong == {"grad.input", "grad.query_weight", "grad.key_weight", "grad.value_weight"}
