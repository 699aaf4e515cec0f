"""Receipts of one release come of one machine, retry no failure, and check what the baseline checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megacpp_validate.evidence.receipt import Check, Machine, Package, Part, Receipt
from megacpp_validate.evidence.release_gate import GateDecision, GateRule
from megacpp_validate.gate.release_asked import Baseline
from tests.gate.release_receipts import CHECK, PROBES, fill, good, judge, put, rules

MACHINE = Machine(gpu="NVIDIA H200", capability="9.0", driver="580.1", torch="2.11.0")
BREAKAGE, MISSING = 1, 4
SECOND = replace(CHECK, name="bf16.backward")


def rules_of(decision: GateDecision) -> set[GateRule]:
    return {rule for cell in decision.closing for rule in cell.rules}


@pytest.mark.parametrize(
    ("machine", "rule"),
    [
        (replace(MACHINE, gpu="NVIDIA H100 80GB HBM3"), GateRule.TARGET),
        (replace(MACHINE, driver="570.2"), GateRule.ENVIRONMENT),
        (replace(MACHINE, torch="2.10.0"), GateRule.ENVIRONMENT),
    ],
    ids=["card", "driver", "torch"],
)
def test_one_cell_of_another_machine_is_no_evidence(machine: Machine, rule: GateRule, tmp_path: Path) -> None:
    fill(tmp_path, machine=MACHINE)
    put(tmp_path, good("permute", machine=machine, hours=2))
    decision = judge(tmp_path)
    assert (decision.exit_code, rules_of(decision)) == (MISSING, {rule})
    assert [cell.cell for cell in decision.closing] == ["te2.20.2-h200-permute"]


def test_another_node_of_the_same_kind_passes(tmp_path: Path) -> None:
    fill(tmp_path, machine=MACHINE)
    put(tmp_path, good("permute", machine=replace(MACHINE, host="node18"), hours=2))
    assert judge(tmp_path).open


@pytest.mark.parametrize(
    ("retry", "code"),
    [
        ("fail: permute.bf16 out of bounds", BREAKAGE),
        ("relative error 0.3, tolerance 0.1", BREAKAGE),
        ("the loss was NaN", BREAKAGE),
        ("ImportError: undefined symbol: foo", BREAKAGE),
        ("node-fail: the node was lost (node n3)", 0),
        ("no-receipt: the job left no receipt; its last words: UserWarning: version mismatch", 0),
        ("rendezvous: connection refused", 0),
    ],
)
def test_what_failed_is_not_tried_until_it_passes(retry: str, code: int, tmp_path: Path) -> None:
    fill(tmp_path)
    put(tmp_path, good("permute", retries=(retry,)))
    decision = judge(tmp_path)
    assert decision.exit_code == code
    assert rules_of(decision) == ({GateRule.CONTRADICTED} if code else set())


def before(commit: str = "a" * 40) -> Baseline:
    rows = {probe: good(probe, stack="te2.17.1", checks=(CHECK, SECOND), commit=commit) for probe in PROBES}
    return Baseline("te2.17.1", rows, "0" * 64)


def judged_with(receipt: Receipt, folder: Path, *, required: bool, commit: str = "a" * 40) -> GateDecision:
    fill(folder, checks=(CHECK, SECOND))
    put(folder, receipt)
    return judge(folder, rules(baseline="required" if required else "any"), baseline=before(commit))


def told(decision: GateDecision) -> str:
    return " ".join(text for cell in decision.cells for text in cell.warnings)


@pytest.mark.parametrize("part", [False, True])
def test_a_check_that_the_baseline_had_must_be_there(part: bool, tmp_path: Path) -> None:
    lost = good("permute", checks=(CHECK, replace(SECOND, parts=())) if part else (CHECK,))
    decision = judged_with(lost, tmp_path / "release", required=True)
    assert (decision.exit_code, rules_of(decision)) == (MISSING, {GateRule.BASELINE})
    name = "frobenius of bf16.backward" if part else "bf16.backward"
    assert f"te2.17.1 checked {name}, and this receipt does not" in str(decision.closing[0])
    for decision in (
        judged_with(lost, tmp_path / "upgrade", required=False),
        judged_with(lost, tmp_path / "suite", required=True, commit="b" * 40),  # the suite itself may have changed
    ):
        assert decision.open
        assert f"te2.17.1 checked {name}, and this receipt does not" in told(decision)


@pytest.mark.parametrize(("bound", "seen"), [(0.015, False), (0.1, True)])
def test_a_bound_that_is_far_wider_than_it_was_is_told(bound: float, seen: bool, tmp_path: Path) -> None:
    wide = Check("bf16.forward", True, (Part("frobenius", 0.001, bound, True, "counted roundings"),))
    decision = judged_with(good("permute", checks=(wide, SECOND)), tmp_path, required=True)
    assert decision.open
    assert ("the bound frobenius of bf16.forward is 0.1, 0.01 in te2.17.1" in told(decision)) is seen


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"packages": tuple(Package("transformer_engine", "2.20.2", f"/{at}/x.py") for at in "ab")}, "2 times"),
        ({"checks": (Check("x", True, (Part("relative-error", 0.1, 1.0, True, "y"),)),)}, "lets zeros pass"),
        ({"checks": (Check("x.backend", True),), "backends": ()}, "no path is on record"),
    ],
    ids=["package twice", "bound", "no path"],
)
def test_a_receipt_that_contradicts_itself(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    fill(tmp_path)
    put(tmp_path, replace(good("permute"), **changes))  # type: ignore[arg-type]
    decision = judge(tmp_path)
    assert decision.exit_code == MISSING
    assert said in str(decision)
