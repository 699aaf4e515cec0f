"""The verb of the suite's own score, on two mutants that are both killed."""

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
from tests.command_line import make_run

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


def line(catalog: Catalog, mutant: Mutant | None = None) -> str:
    """Every probe once; that of the mutant's module has a check that failed."""
    red = mutant.module if mutant else ""
    receipts = tuple(
        Receipt(
            f"s-cpu-{row.id}", "s", "cpu", row.id, Outcome.FAIL if row.id == red else Outcome.PASS, "", "te",
            checks=(Check("bf16.forward", False),) if row.id == red else (),
        )
        for row in catalog.modules
    )  # fmt: skip
    name, requested = (mutant.id, mutant.requested) if mutant else ("", "te")
    return run_line(SelftestRun(name, requested=requested, seed=3, receipts=receipts, reached=1))


def test_every_mutant_killed_and_blamed_rightly_and_no_alarm_is_open(
    catalog: Catalog, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line(catalog, mutant) for mutant in plan_selftest(catalog, MUTANTS).mutants]
    planter = Planter("".join([*lines, line(catalog) * 2]))
    monkeypatch.setattr(selftest_runs, "host_interpreter", lambda *_: planter)
    monkeypatch.setenv("COLUMNS", "200")
    said = make_run(capfd, monkeypatch, "selftest")(*MUTANTS, "--clean=14", "--verbose")
    assert said.code == 0, said
    assert "caught and named as they must be: 2 of 2" in said.out
    assert "bf16.forward" in said.out
