"""The probe of the expert bank passes on every path, and each planted fault fails the check that is meant for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import expert_gemm, fp8_scope
from megacpp_validate.bridge.features import read_features
from megacpp_validate.native.grouped_gemm import grouped_gemm, grouped_gemm_loop
from megacpp_validate.probes import expert_gemm as probe
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

run = partial(run_probe, probe)


@pytest.mark.parametrize("seed", range(3))
def test_the_native_path_passes(seed: int) -> None:
    bench = run(seed=seed)
    assert failed(bench) == set()
    assert {row.claimed for row in bench.backends} == {"native"}


@pytest.mark.usefixtures("te_double")
def test_te_passes_in_every_recipe_and_is_seen() -> None:
    bench = run("te", RECIPES)
    assert failed(bench) == set()
    native = {row.path for row in bench.backends if row.claimed == "native"}
    assert native == {"expert_gemm"}, "no rows, and widths that FP8 does not take"


def product(rows: Fault = lambda one: one, weights: Fault = lambda one: one) -> Plant:
    """A product in torch of other rows and weights."""
    return putting(expert_gemm, "grouped_gemm", lambda x, w, counts: grouped_gemm(rows(x), weights(w), counts))


def idle_left(gradient: Any) -> Any:
    return torch.where(gradient.abs().sum((1, 2), keepdim=True) == 0, 1.0, gradient)


OUT = {"bf16.middle-idle.forward"}
ON_NATIVE: dict[str, tuple[Plant, set[str]]] = {
    "a bias that is not there": (after(expert_gemm, "grouped_gemm", lambda out: out + 0.05), OUT),
    "idle gradients left": (product(weights=in_gradient(idle_left)), {"bf16.middle-idle.grad.weight1"}),
    "a weight without a gradient": (
        product(weights=lambda weights: weights.detach()), {"bf16.middle-idle.grad.weight0"},
    ),
}  # fmt: skip
FORWARD = (expert_gemm.TeExpertBank, "forward")


def looped(self: Any, rows: Any, counts: Any, **_: Any) -> Any:
    return grouped_gemm_loop(rows, torch.stack([self.weight_of(expert) for expert in range(4)]), counts)


def scope_off(real: Any) -> Any:
    return lambda **given: real(**{**given, "features": read_features("off")})


BY_TE: dict[str, tuple[Plant, set[str]]] = {
    "false claim": (putting(*FORWARD, looped), {"fp32.middle-idle.expert_gemm.fp32.middle-idle.backend"}),
    "FP8 that is not computed in": (
        changing(fp8_scope, "low_precision", scope_off),
        {f"fp8.current.middle-idle.{name}.rounded" for name in ("forward", "grad.rows")},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("plant", "wanted"), ON_NATIVE.values(), ids=ON_NATIVE)
def test_a_fault_on_the_native_path_is_caught(plant: Plant, wanted: set[str]) -> None:
    check_caught(new_bench("expert_gemm"), probe.probe, plant, wanted)


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(("plant", "wanted"), BY_TE.values(), ids=BY_TE)
def test_a_fault_of_the_path_by_te_is_caught(plant: Plant, wanted: set[str]) -> None:
    check_caught(new_bench("expert_gemm", "te", ("current",)), probe.probe, plant, wanted)


@pytest.mark.usefixtures("te_double")
def test_rows_that_are_not_padded_are_an_error(monkeypatch: Patch) -> None:
    monkeypatch.setattr(expert_gemm, "te_state", lambda: {"enabled": False})
    with pytest.raises(ValueError, match="multiples of 16"):
        run("te", ("current",))
