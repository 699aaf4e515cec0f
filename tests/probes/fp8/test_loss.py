"""The probe of training: what each run leaves is looked at, and a run that dies, stops or falls back is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.probes.bench import Bench, CannotRun
from megacpp_validate.probes.fp8 import loss
from megacpp_validate.probes.fp8.loss import Ended, Job, check_runs, plan_jobs, train_side_by_side
from megacpp_validate.probes.order import Order, Target
from megacpp_validate.training.gate_run import GateRun, train_to_file

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


def train_here(jobs: Sequence[Job]) -> list[Ended]:
    """As the processes do it, in this one, which has the double."""
    ended = []
    for job in jobs:
        order = {name: value for name, value in job.order.items() if name != "path"}
        trained = train_to_file(GateRun(**order), job.path)
        ended.append(Ended(0, trained, ""))
    return ended


def aligned(ended: list[Ended]) -> list[Ended]:
    """The in-projection of `tiny` is no multiple of 16 wide, and rightly native; that of `gate` is."""
    for end in ended:
        end.said["backends"].pop("layers.1.in_projection")
    return ended


@pytest.mark.usefixtures("te_double")
def test_every_run_leaves_a_whole_curve_on_transformer_engine(tmp_path: Path) -> None:
    bench = new_bench(tmp_path)
    jobs = plan_jobs(bench)
    check_runs(bench, jobs, aligned(train_here(jobs)))
    # The double's layers do not show their quantizers, and that is told.
    assert failed(bench) == ["delayed.seed0.casts"]
    assert [check.name for check in bench.checks if check.name.startswith("bf16")] == [
        f"bf16.seed0.{what}" for what in ("ended", "curve", "backends")
    ]


def rewrite(change: Callable[[dict[str, Any]], None]) -> Callable[[Job], None]:
    def apply(job: Job) -> None:
        curve = json.loads(job.path.read_text())
        change(curve)
        job.path.write_text(json.dumps(curve))

    return apply


FAULTS: dict[str, tuple[Callable[[Job], None], str]] = {
    "no curve": (lambda job: job.path.unlink(), "curve"),
    "steps missing": (rewrite(lambda curve: curve["steps"].pop()), "curve"),
    "not finite": (rewrite(lambda curve: curve["losses"].__setitem__(3, None)), "curve"),
}


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Ended]]:
    """A run that is as it should be: its curve, and how it ended."""
    (job,) = plan_jobs(new_bench(tmp_path_factory.mktemp("run"), requested="native", recipes="", seeds="0"))
    return job.path, train_here([job])


@pytest.fixture
def trained(trained_once: tuple[Path, list[Ended]], tmp_path: Path) -> tuple[Bench, list[Job], list[Ended]]:
    """A copy of it."""
    curve, ended = trained_once
    bench = new_bench(tmp_path, requested="native", recipes="", seeds="0")
    jobs = plan_jobs(bench)
    shutil.copy(curve, jobs[0].path)
    return bench, jobs, deepcopy(ended)


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_with_a_run_is_told(trained: tuple[Bench, list[Job], list[Ended]], name: str) -> None:
    bench, jobs, ended = trained
    damage, check = FAULTS[name]
    damage(jobs[0])
    check_runs(bench, jobs, ended)
    assert failed(bench) == [f"bf16.seed0.{check}"]


def test_a_run_that_died_and_one_that_fell_back_are_told(trained: tuple[Bench, list[Job], list[Ended]]) -> None:
    bench, jobs, ended = trained
    check_runs(bench, jobs, [Ended(-9, ended[0].said, "killed")])
    assert failed(bench) == ["bf16.seed0.ended"]
    bench.checks.clear()
    object.__setattr__(bench.order, "requested", "te")
    check_runs(bench, jobs, ended)
    assert failed(bench) == ["bf16.seed0.backends"]


@pytest.mark.thorough
def test_runs_are_processes_that_are_waited_for(tmp_path: Path) -> None:
    bench = new_bench(tmp_path, requested="native", recipes="", seeds="0")
    jobs = plan_jobs(bench)
    jobs.append(Job("bf16", 1, {**jobs[0].order, "seed": 1, "size": "none"}, tmp_path / "second.curve"))
    jobs[1].path.write_text("of an earlier session")
    ended = train_side_by_side(jobs)
    assert [end.status == 0 for end in ended] == [True, False]
    assert "there is no size 'none'" in ended[1].words
    check_runs(bench, jobs, ended)
    assert failed(bench) == ["bf16.seed1.ended", "bf16.seed1.curve"]


def test_recipes_are_not_trained_natively(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="run in Transformer Engine only"):
        loss.probe(new_bench(tmp_path, requested="native"))
