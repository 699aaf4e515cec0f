"""The FP8 copy of a weight kept between microbatches: right as it is, and each way to keep a wrong one shows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import fp8_scope  # noqa: E402
from megacpp_validate.bridge import imports as te  # noqa: E402
from megacpp_validate.probes.bench import Bench  # noqa: E402
from megacpp_validate.probes.low_precision import check_kept_weights  # noqa: E402
from megacpp_validate.probes.order import Order, Target  # noqa: E402

Patch = pytest.MonkeyPatch
RECIPES = ("delayed", "current", "block")
BF16 = {"params_dtype": torch.bfloat16, "device": "cpu"}
pytestmark = pytest.mark.usefixtures("te_double")


def bench_of(probe: str = "native_block", *recipes: str) -> Bench:
    target = Target("cpu", "", recipes=recipes or RECIPES, production_recipe="delayed")
    return Bench(Order(probe, "stack", target, "te", quick=True))


def failed(bench: Bench) -> dict[str, set[str]]:
    return {
        check.name: {part.name for part in check.parts if not part.passed} for check in bench.checks if not check.passed
    }


def linear() -> Any:
    return te.linear.require()(32, 48, **BF16)


def mlp() -> Any:
    return te.layernorm_mlp.require()(32, 48, bias=False, normalization="RMSNorm", activation="swiglu", **BF16)


def split() -> Any:
    parts = {"query": 16, "key": 16, "value": 16}
    return te.layernorm_linear.require()(32, 48, bias=False, parameters_split=parts, **BF16)


def grouped() -> Any:
    return te.grouped_linear.require()(2, 32, 48, bias=False, **BF16)


def judge(make: Callable[[], Any], recipe: str = "current", **options: Any) -> Bench:
    bench = bench_of()
    torch.manual_seed(0)
    wide = 32 if make is mlp else 48
    rows, gradient = bench.randn(32, 32, dtype=torch.bfloat16), bench.randn(32, wide, dtype=torch.bfloat16)
    enter = partial(fp8_scope.low_precision, target="cpu", amax_reduction_group=fp8_scope.SINGLE_OWNER, recipe=recipe)
    others = ([16, 16],) if make is grouped else ()
    check_kept_weights(bench, "fp8", (make(), make()), rows, gradient, options.get("enter", enter), *others)
    return bench


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", [linear, mlp, split, grouped])
def test_every_layer_keeps_the_right_copy(make: Callable[[], Any], recipe: str) -> None:
    bench = judge(make, recipe)
    assert [check.name for check in bench.checks] == ["fp8.renewed", "fp8.kept"]
    assert failed(bench) == {}
    assert {part.observed for check in bench.checks for part in check.parts if not part.at_least} == {0.0}


def test_weights_that_never_count_are_seen(monkeypatch: Patch) -> None:
    """Both layers take their first weights for good: they agree, and not with their weights."""
    from transformer_engine.pytorch.layer import Rounder, TransformerEngineBaseModule

    real, start = Rounder._round, TransformerEngineBaseModule.start

    def started(self: Any, *given: Any) -> Any:
        rounder, last = start(self, *given)
        if rounder is not None:
            rounder.for_good = self.__dict__.setdefault("for_good", {})
        return rounder, last

    def for_good(self: Any, tensor: Any, role: Any, gemm: int) -> Any:
        made = real(self, tensor, role, gemm)
        return self.for_good.setdefault(gemm, made) if role == "weight" else made

    monkeypatch.setattr(TransformerEngineBaseModule, "start", started)
    monkeypatch.setattr(Rounder, "_round", for_good)
    assert failed(judge(linear)) == {"fp8.renewed": {"other-weights"}}


def test_what_the_scope_does_not_change_is_not_judged() -> None:
    bench = judge(linear, enter=nullcontext)
    assert [(check.name, check.passed) for check in bench.checks] == [("fp8.renewed", True)]
    assert bench.checks[0].detail.startswith("not judged")
