"""Runs in processes of their own: what comes back from a good one, a damaged one, and one that dies or hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.canary.dynamic.selftest import plan_selftest  # noqa: E402
from megacpp_validate.catalog.bridge import Catalog  # noqa: E402
from megacpp_validate.evidence.receipt import Outcome  # noqa: E402
from megacpp_validate.evidence.selftest import Mutant, SelftestOrder, read_runs  # noqa: E402
from megacpp_validate.selftest.tasks import Task, plan_tasks, run_tasks  # noqa: E402

LIMIT_S = 120.0


@pytest.fixture(scope="module")
def mutants(catalog: Catalog) -> dict[str, Mutant]:
    return {row.id: row for row in catalog.mutants}


def test_clean_runs_come_first_on_both_paths_and_every_run_has_its_seed(catalog: Catalog) -> None:
    order = plan_selftest(catalog, ["attention-zeros", "attention-causal-lost"], clean=15, seed=40)
    tasks = plan_tasks(order)
    assert [task.requested for task in tasks] == ["te", "native", "te", "te", "native"]
    assert [task.seed for task in tasks] == [40, 41, 42, 43, 44]
    assert [task.mutant.id if task.mutant else "" for task in tasks[2:]] == [
        "", "attention-zeros", "attention-causal-lost",
    ]  # fmt: skip
    assert tasks[0].order("attention").cell == "te0.0.0+double-cpu-attention"
    assert tasks[1].order("attention").cell == "native-cpu-attention"
    assert tasks[1].order("attention").target.recipes == ()


def test_runs(mutants: dict[str, Mutant]) -> None:
    zeros = mutants["attention-zeros"]
    tasks = [
        Task(("attention",), "te", 0),
        Task(("attention", "no_such_probe"), "te", 0, zeros),
        Task(("attention",), "te", 0, replace(zeros, id="gone", at="no_such_entry")),
        Task(("attention",), "native", 0, mutants["attention-soft-cap-lost"]),
    ]
    clean, damaged, gone, native = run_tasks(tasks, 2, LIMIT_S)
    assert [receipt.outcome for receipt in clean.receipts] == [Outcome.PASS]
    assert clean.receipts[0].checks == ()
    assert (clean.reached, clean.trouble) == (0, "")
    assert [receipt.outcome for receipt in damaged.receipts] == [Outcome.FAIL, Outcome.IMPORT_ERROR]
    assert damaged.receipts[0].checks
    assert not any(check.passed for check in damaged.receipts[0].checks)
    assert damaged.reached > 0
    assert (gone.planted, gone.receipts) == (False, ())
    assert "no_such_entry" in gone.trouble
    assert [receipt.outcome for receipt in native.receipts] == [Outcome.FAIL]
    assert native.receipts[0].requested == "native"


def test_a_process_that_hangs_or_dies_gives_no_receipts() -> None:
    (hung,) = run_tasks([Task(("attention", "permute"), "te", 3)], 1, 0.05)
    assert (hung.trouble, hung.receipts, hung.seed) == ("it did not end within 0.05 s", (), 3)
    (died,) = run_tasks([Task(None, "native", 0)], 1, LIMIT_S)  # type: ignore[arg-type]
    assert (died.trouble, died.receipts) == ("exit status 1", ())


def test_the_command(mutants: dict[str, Mutant], tmp_path: Path) -> None:
    order = SelftestOrder(("permute",), (mutants["unpermute-doubled"],), clean=1, seed=3)
    command = [sys.executable, "-m", "megacpp_validate.selftest", str(tmp_path / "runs"), "2", str(LIMIT_S)]
    switched_off = {**os.environ, "MEGACPP_DISABLE_TE": "1", "MEGACPP_DISABLE_TE_PERMUTE": "1"}  # not in here
    subprocess.run(command, input=json.dumps(asdict(order)), env=switched_off, text=True, check=True)
    clean, damaged = read_runs((tmp_path / "runs").read_text())
    assert [receipt.outcome for receipt in clean.receipts] == [Outcome.PASS]
    assert (clean.mutant, clean.seed, damaged.mutant, damaged.seed) == ("", 3, "unpermute-doubled", 4)
    assert damaged.receipts[0].outcome is Outcome.FAIL
