"""Faults of the host at the release gate: no evidence, nobody's doing, and no contradiction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megacpp_validate.evidence.receipt import Failure, Outcome, Receipt, cell_id
from megacpp_validate.evidence.release_gate import GateRule
from tests.gate.release_receipts import CHECK, FAILED, PROBES, STACK, good, judge, put, rules

ECC = Failure("torch.AcceleratorError", "CUDA error: uncorrectable ECC error encountered")


def met(probe: str, failure: Failure = ECC, **other: float) -> Receipt:
    made = good(probe, **other)
    return replace(made, outcome=Outcome.ERROR, reason=f"{failure.type}: {failure.message}", failure=failure, checks=())


@pytest.mark.parametrize("failure", [ECC, Failure("SIGKILL", "nothing")], ids=["raised", "killed"])
def test_it_closes_for_want_of_evidence(tmp_path: Path, failure: Failure) -> None:
    put(tmp_path, *(good(probe) for probe in PROBES if probe != "permute"), met("permute", failure))
    found = judge(tmp_path)
    assert (found.open, found.exit_code, found.culprits) == (False, 4, ())
    (row,) = found.closing
    assert (row.probe, row.rules) == ("permute", (GateRule.NOT_RUN,))
    assert "a fault of the host" in row.reasons[0]


def test_what_it_blocks_is_no_breakage_either(tmp_path: Path) -> None:
    by = cell_id(STACK, "h200", "imports")
    others = (
        replace(good(probe), outcome=Outcome.BLOCKED, blocked_by=by, checks=(), reason=f"blocked by {by}")
        for probe in PROBES[1:]
    )
    put(tmp_path, met("imports"), *others)
    found = judge(tmp_path)
    assert (found.exit_code, found.culprits) == (4, ())


def test_an_older_one_contradicts_nothing_and_is_told(tmp_path: Path) -> None:
    put(tmp_path, *(good(probe) for probe in PROBES))
    put(tmp_path, met("attention", hours=2.0), run="earlier")
    found = judge(tmp_path)
    assert found.open
    (old,) = (row for row in found.cells if row.run == "earlier")
    assert old.rules == (GateRule.SUPERSEDED,)
    assert "a fault of the host" in old.warnings[0]


def test_where_every_cell_must_be_green_it_closes_for_want_of_evidence(tmp_path: Path) -> None:
    put(tmp_path, *(good(probe) for probe in PROBES), met("moe_smoke"))
    found = judge(tmp_path, rules(others="close"))
    assert (found.exit_code, found.culprits) == (4, ())
    assert [row.rules for row in found.closing] == [(GateRule.NOT_RUN,)]


def test_a_wrong_number_beside_it_still_contradicts(tmp_path: Path) -> None:
    put(tmp_path, *(good(probe) for probe in PROBES))
    put(tmp_path, replace(met("attention", hours=2.0), checks=(CHECK, FAILED)), run="earlier")
    found = judge(tmp_path)
    assert (found.open, found.exit_code) == (False, 1)
    assert GateRule.CONTRADICTED in {rule for row in found.closing for rule in row.rules}
