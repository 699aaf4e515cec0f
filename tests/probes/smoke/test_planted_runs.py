"""Real runs on two ranks with a fault between them: the cells of the smoke run turn red, by the check that should.

Second looks, minutes of them: `tests/conftest.py` lists this file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.evidence.receipt import Outcome, Receipt
from megacpp_validate.probes.order import Order, Target
from megacpp_validate.probes.process import run_probe
from megacpp_validate.probes.smoke import runs

pytestmark = pytest.mark.thorough


def run_cell(catalog: Catalog, name: str, folder: Path) -> Receipt:
    row = next(row for row in catalog.smoke if row.id == name)
    return run_probe(
        Order(row.id, "native", Target("cpu", ""), "native", code=row.code, stands_on=tuple(row.stands_on),
              settings={**row.settings, "steps": "4", "twins": "2 4"}, once=True, folder=str(folder))
    )  # fmt: skip


@pytest.mark.parametrize(("cell", "fault"), [("smoke_tiny_tensor", "norm-gradient-not-summed")])
def test_a_fault_of_the_plan_does_not_reproduce_one_rank(
    cell: str, fault: str, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = runs.Runs.train

    def planted(self: runs.Runs, name: str, order: runs.SmokeOrder, *place: Any) -> runs.Run:
        faulty = replace(order, fault=fault, audit=False) if name == "plan" else order
        return train(self, name, faulty, *place)

    monkeypatch.setattr(runs.Runs, "train", planted)
    receipt = run_cell(catalog, cell, tmp_path)
    assert receipt.outcome is Outcome.FAIL, receipt.reason
    assert "reproduces.grad_norm" in {check.name for check in receipt.checks if not check.passed}


def test_without_a_fault_it_does(catalog: Catalog, tmp_path: Path) -> None:
    receipt = run_cell(catalog, "smoke_tiny_tensor", tmp_path)
    assert receipt.outcome is Outcome.PASS, receipt.reason
    assert {record.name for record in receipt.training} == {"plan", "one-rank", "twin-1", "twin-2", "twin-4"}
