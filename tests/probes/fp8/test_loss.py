"""The probe of training: what each run leaves is looked at, and a run that dies, stops or falls back is told."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.evidence.loss_curve import read_curve
from megacpp_validate.probes.bench import Bench, CannotRun
from megacpp_validate.probes.fp8 import loss
from megacpp_validate.probes.fp8.loss import ENVIRONMENT, check_runs, plan_orders
from megacpp_validate.probes.order import Order, Target
from megacpp_validate.probes.smoke.composition import train
from megacpp_validate.probes.smoke.runs import Run, open_runs
from megacpp_validate.training.parallel.launch import RunEnd

MADE_WITH = {"torch", "transformer_engine", "gpu"}
DOUBLE = Target("cpu", "", ("delayed", "current", "block"), "delayed")


def new_bench(folder: Path, requested: str = "te", **settings: str) -> Bench:
    given = {"recipes": "delayed", "seeds": "0 1", "size": "tiny", **settings}
    return Bench(
        Order(
            "fp8_loss", "double", DOUBLE, requested, quick=True, code="fp8.loss",
            stands_on=("layer_spec", "fp8_scope"), settings=given, folder=str(folder),
        )
    )  # fmt: skip


def failed(bench: Bench) -> list[str]:
    return [check.name for check in bench.checks if not check.passed]


def train_here(bench: Bench) -> list[Run]:
    """As the processes do it, in this one, which has the double."""
    with open_runs(bench) as runs:
        trained = [train(order, name) for name, order in plan_orders(bench, runs).items()]
    for run in trained:  # the in-projection of `tiny` is no multiple of 16 wide, and rightly native; that of `gate` is
        run.first["choices"].pop("layers.1.in_projection")
    return trained


@pytest.mark.usefixtures("te_double")
def test_every_run_leaves_a_whole_curve_on_transformer_engine(tmp_path: Path) -> None:
    bench = new_bench(tmp_path)
    check_runs(bench, train_here(bench))
    # The double's layers do not show their quantizers, and that is told.
    assert failed(bench) == ["delayed.seed0.casts"]
    assert [check.name for check in bench.checks if check.name.startswith("bf16")] == [
        f"bf16.seed0.{what}" for what in ("ended", "curve", "backends")
    ]
    curve = read_curve(bench.artefact("delayed-0.curve"))
    assert (curve.recipe, len(curve.losses), set(curve.made_with)) == ("delayed", 30, MADE_WITH)


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that is as it should be."""
    (run,) = train_here(new_bench(tmp_path_factory.mktemp("run"), requested="native", recipes="", seeds="0"))
    return run


@pytest.mark.parametrize(
    "damage",
    [lambda curve: curve["steps"].pop(), lambda curve: curve["losses"].__setitem__(3, None)],
    ids=["steps missing", "not finite"],
)
def test_what_is_wrong_with_a_curve_is_told(tmp_path: Path, trained_once: Run, damage: Callable[[Any], None]) -> None:
    bench, run = new_bench(tmp_path, requested="native", recipes="", seeds="0"), deepcopy(trained_once)
    damage(run.first["curve"])
    check_runs(bench, [run])
    assert failed(bench) == ["bf16.seed0.curve"]


def test_a_run_that_died_and_one_that_fell_back_are_told(tmp_path: Path, trained_once: Run) -> None:
    bench = new_bench(tmp_path, requested="native", recipes="", seeds="0")
    old = bench.artefact("bf16-0.curve")
    old.write_text("of an earlier session")
    check_runs(bench, [replace(trained_once, end=RunEnd("died", (0,), "killed", (), 0.0))])
    assert failed(bench) == ["bf16.seed0.ended", "bf16.seed0.curve"]
    assert not old.exists()
    bench.checks.clear()
    object.__setattr__(bench.order, "requested", "te")
    check_runs(bench, [trained_once])
    assert failed(bench) == ["bf16.seed0.backends"]


@pytest.mark.usefixtures("te_double")
def test_experts_that_do_not_take_deep_gemm_are_seen(tmp_path: Path) -> None:
    bench = new_bench(tmp_path, recipes="deep_gemm", seeds="0")
    check_runs(bench, train_here(bench))
    assert failed(bench) == ["deep_gemm.seed0.backends"]
    assert bench.checks[-1].detail.endswith("not on te: layers.2.experts")


@pytest.mark.thorough
def test_runs_are_processes_that_are_waited_for(tmp_path: Path) -> None:
    bench = new_bench(tmp_path, requested="native", recipes="", seeds="0")
    with open_runs(bench) as runs:
        orders = plan_orders(bench, runs)
        orders["bf16.seed1"] = replace(orders["bf16.seed0"], seed=1, learning_rate=1e38)
        check_runs(bench, runs.train_beside(orders, [ENVIRONMENT] * 2))
    assert failed(bench) == ["bf16.seed1.ended", "bf16.seed1.curve"]
    assert read_curve(bench.artefact("bf16-1.curve")).planned == 30


def test_recipes_are_not_trained_natively(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="run in Transformer Engine only"):
        loss.probe(new_bench(tmp_path, requested="native"))
