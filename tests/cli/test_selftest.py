"""The verb of the suite's own score: exit codes by what the runs are worth; never open without evidence."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megacpp_validate.canary.dynamic import selftest as selftest_runs
from megacpp_validate.canary.dynamic.selftest import plan_selftest
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.evidence.receipt import Check, Outcome, Receipt
from megacpp_validate.evidence.selftest import Mutant, SelftestRun
from megacpp_validate.process import Call
from megacpp_validate.selftest.tasks import run_line
from tests.command_line import Run, Said, make_run

OPEN, CLOSED, WRONG, MISSING, NO_ENVIRONMENT, INFRASTRUCTURE = 0, 1, 2, 4, 5, 6
MUTANTS = ("attention-zeros", "permute-zeros")


@dataclass
class Planter:
    """Stands where the environment stands: its process writes the lines that a test gives it."""

    lines: str

    def call(self, module: str, *arguments: str) -> Call:
        """A process that reads its order and answers with the lines."""
        assert module == "megacpp_validate.selftest"
        runs = Path(arguments[0])
        script = f"import pathlib; pathlib.Path({str(runs)!r}).write_text({self.lines!r})"
        return Call((sys.executable, "-S", "-c", script), dict(os.environ))


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`selftest` on two mutants and, unless it is told otherwise, as many clean runs as were ordered."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    call = make_run(capfd, monkeypatch, "selftest")

    def run(planter: Planter, *arguments: object, mutants: tuple[str, ...] = MUTANTS) -> Said:
        monkeypatch.setattr(selftest_runs, "host_interpreter", lambda *_: planter)
        return call(*mutants, "--clean=14", *arguments)

    return run


@pytest.fixture
def planted(catalog: Catalog) -> dict[str, Mutant]:
    return {mutant.id: mutant for mutant in plan_selftest(catalog, MUTANTS).mutants}


def line(catalog: Catalog, mutant: Mutant | None = None, red: str = "", **more: object) -> str:
    """Every probe once; `red` is the one whose check failed."""
    receipts = tuple(
        Receipt(
            f"s-cpu-{row.id}", "s", "cpu", row.id, Outcome.FAIL if row.id == red else Outcome.PASS, "", "te",
            checks=(Check("bf16.forward", False),) if row.id == red else (),
        )
        for row in catalog.modules
    )  # fmt: skip
    values = {"requested": mutant.requested if mutant else "te", "seed": 3, "receipts": receipts, "reached": 1, **more}
    return run_line(SelftestRun(mutant.id if mutant else "", **values))  # type: ignore[arg-type]


@pytest.fixture
def clean(catalog: Catalog) -> str:
    return line(catalog) * 2


@pytest.fixture
def killed(catalog: Catalog, planted: dict[str, Mutant]) -> str:
    return "".join(line(catalog, mutant, mutant.module) for mutant in planted.values())


def test_every_mutant_killed_and_blamed_rightly_and_no_alarm_is_open(run: Run, killed: str, clean: str) -> None:
    said = run(Planter(killed + clean), "--verbose")
    assert said.code == OPEN, said
    assert "caught and named as they must be: 2 of 2" in said.out
    assert "bf16.forward" in said.out
