"""The FP8 copy of a weight kept between microbatches: weights that never count show, and no scope is no copy."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.low_precision import check_kept_weights
from megacpp_validate.probes.observe import Enter
from tests.probes.planting import RECIPES, Patch, module, new_bench

pytestmark = pytest.mark.usefixtures("te_double")


def judge(enter: Enter | None = None) -> Bench:
    bench = new_bench("native_block", "te", RECIPES, production_recipe="delayed")
    rows, gradient = bench.randn(32, 32, dtype=torch.bfloat16), bench.randn(32, 48, dtype=torch.bfloat16)
    pair = bench.te_layer("linear", 32, 48), bench.te_layer("linear", 32, 48)
    check_kept_weights(bench, "fp8", pair, rows, gradient, enter or bench.low_precision("current"))
    return bench


def test_weights_that_never_count_are_seen(monkeypatch: Patch) -> None:
    """Both layers take their first weights for good: they agree, and not with their weights."""
    layer = module("layer")
    real, start = layer.Rounder._round, layer.TransformerEngineBaseModule.start

    def started(self: Any, *given: Any) -> Any:
        rounder, last = start(self, *given)
        if rounder is not None:
            rounder.for_good = self.__dict__.setdefault("for_good", {})
        return rounder, last

    def for_good(self: Any, tensor: Any, role: Any, gemm: int) -> Any:
        made = real(self, tensor, role, gemm)
        return self.for_good.setdefault(gemm, made) if role == "weight" else made

    monkeypatch.setattr(layer.TransformerEngineBaseModule, "start", started)
    monkeypatch.setattr(layer.Rounder, "_round", for_good)
    assert [part.name for part in judge().checks[0].parts if not part.passed] == ["other-weights"]


def test_what_the_scope_does_not_change_is_not_judged() -> None:
    bench = judge(enter=nullcontext)
    assert [(check.name, check.passed) for check in bench.checks] == [("fp8.renewed", True)]
    assert bench.checks[0].detail.startswith("not judged")
