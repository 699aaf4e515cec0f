"""The release gate over small stores: what opens it, what it is bound to, what a waiver holds off; that it is pure."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, replace
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.catalog.gate import GateRules, ReleaseWaiver
from megacpp_validate.evidence.receipt import Failure, Library, Machine, Outcome, Receipt, Timing
from megacpp_validate.evidence.receipt_file import receipt_text
from megacpp_validate.evidence.release_gate import CellVerdict, GateDecision, GateRule, WaiverState
from megacpp_validate.evidence.store import ReceiptInvalid, read_store
from megacpp_validate.gate.release_asked import Baseline
from tests.gate.release_receipts import (
    AT,
    COMMIT,
    FAILED,
    IMAGE,
    NOT_A_NUMBER,
    OTHER_COMMIT,
    PROBES,
    STACK,
    TARGET,
    compiled,
    fill,
    golden,
    good,
    judge,
    place,
    put,
    red,
    rules,
)

CELL = f"{STACK}-{TARGET}-attention"
OPEN, CLOSED, MISSING = 0, 1, 4
TODAY = AT.date()
BEFORE = Baseline("te2.12.0", {probe: good(probe, stack="te2.12.0") for probe in PROBES}, "0" * 64)


def rows_of(decision: GateDecision, rule: GateRule) -> list[CellVerdict]:
    return [verdict for verdict in decision.cells if rule in verdict.rules]


def test_a_good_store_opens(tmp_path: Path) -> None:
    decision = judge(fill(tmp_path))
    assert (decision.open, decision.exit_code) == (True, OPEN)
    seen = [(one.probe, one.accepted, one.closes) for one in decision.required]
    assert seen == [(probe, True, False) for probe in PROBES]
    assert decision.commit == COMMIT
    assert (decision.missing, decision.unreadable, decision.foreign, decision.culprits) == ((), (), (), ())


def test_what_is_foreign_is_told_and_closes_nothing(tmp_path: Path) -> None:
    store = fill(tmp_path)
    put(store, red("attention", stack="te2.17.1"), red("attention", target="b200"), good("fp8_delayed"), run="others")
    put(store, good("attention", hours=9.0), run="older")
    (store / "again").mkdir()
    shutil.copy(place(store, "attention"), place(store, "attention", "again"))
    (store / "linked").symlink_to(store / "older")
    (store / "notes.json").write_text('{"schema_id": "megacpp-validate/upgrade/1"}')
    decision = judge(store)
    assert decision.open
    told = {(row.run, row.cell): row.rules[0] for row in decision.cells if not row.required}
    # Of two that are byte for byte the same, the first by its place is kept.
    assert told == {
        ("others", "te2.17.1-h200-attention"): GateRule.STACK,
        ("others", "te2.20.2-b200-attention"): GateRule.TARGET,
        ("others", "te2.20.2-h200-fp8_delayed"): GateRule.NOT_REQUIRED,
        ("older", CELL): GateRule.SUPERSEDED,
        ("run", CELL): GateRule.REPLAYED,
        (".", "notes"): GateRule.UNREADABLE,
        (".", "linked"): GateRule.UNREADABLE,
    }
    assert len(decision.foreign) == 3
    assert ["is a link" in one.reason for one in decision.unreadable] == [True, False]
    assert "another kind" in decision.unreadable[1].reason


def test_names_of_others_are_never_places_or_cells(tmp_path: Path) -> None:
    store = fill(tmp_path)
    put(store, replace(good("attention", hours=3.0), stack="<script>", cell="<script>-h200-attention"), run="hostile")
    text = receipt_text(good("attention", hours=4.0)).replace(CELL, f"../../{CELL}")
    (store / "hostile" / "outside.json").write_text(text)
    decision = judge(store)
    assert decision.open
    assert [row.rules for row in decision.cells if row.run == "hostile"] == [(GateRule.NAME,)] * 2


def test_the_commit_that_is_asked_for_is_the_one_that_counts(tmp_path: Path) -> None:
    store = fill(tmp_path)
    put(store, *(red(probe, hours=0.5, commit=OTHER_COMMIT) for probe in PROBES), run="later")
    assert judge(store).exit_code == CLOSED
    decision = judge(store, commit=COMMIT)
    assert decision.open
    assert len(rows_of(decision, GateRule.COMMIT)) == len(PROBES)
    assert judge(store, commit="c" * 40).exit_code == MISSING


def test_a_golden_image_is_held_to_its_image_lock_and_clean_commit(tmp_path: Path) -> None:
    wanted = rules("release", "gb10", signature="any", baseline="any")
    make = partial(golden, target="gb10", machine=Machine(gpu="GB10", capability="12.1"))
    put(tmp_path, *map(make, PROBES))
    assert judge(tmp_path, wanted).open
    faults = {
        GateRule.IMAGE: make("attention", image_digest=f"sha256:{'2' * 64}"),
        GateRule.LOCK: make("attention", lock_hash=""),
        GateRule.COMMIT: make("attention", commit=f"{COMMIT}-dirty"),
        GateRule.SCHEMA: make("attention", schema_id="megacpp-validate/receipt/4"),
    }
    for rule, receipt in faults.items():
        put(tmp_path, receipt)
        decision = judge(tmp_path, wanted)
        assert decision.exit_code == MISSING
        assert next(row for row in decision.closing if row.probe == "attention").rules[0] is rule
    put(tmp_path, make("attention"))
    assert judge(tmp_path, wanted, image=IMAGE, lock="c" * 64).open
    assert judge(tmp_path, wanted, image=f"registry.example.org/te@sha256:{'3' * 64}").exit_code == MISSING
    bare = wanted.model_copy(update={"kind": rules("release", "gb10", baseline="any").kind})
    assert judge(tmp_path, bare).closing[0].rules == (GateRule.SIGNATURE,)


def test_a_red_cell_that_is_not_required_closes_where_the_rules_want_every_cell_green(tmp_path: Path) -> None:
    store = fill(tmp_path)
    put(store, red("fp8_delayed"))
    assert judge(store).open
    decision = judge(store, rules(others="close"))
    assert [(row.probe, row.rules) for row in decision.closing] == [("fp8_delayed", (GateRule.OUTCOME,))]
    assert decision.exit_code == CLOSED
    put(store, good("fp8_delayed", hours=0.5), run="newer")
    decision = judge(store, rules(others="close"))
    assert [(row.run, row.rules) for row in decision.closing] == [("run", (GateRule.CONTRADICTED,))]
    put(store, red("fp8_delayed", environment="f" * 64))
    assert judge(store, rules(others="close")).open
    put(store, red("fp8_delayed", hours=0.2, commit=OTHER_COMMIT), red("fp8_block", hours=24 * 40), run="others")
    assert judge(store, rules(others="close")).open
    put(store, good("fp8_delayed", hours=-3.0), run="future")
    put(store, red("fp8_delayed", hours=0.1), run="newest")
    assert judge(store, rules(others="close")).exit_code == CLOSED
    place(store, "fp8_delayed", "newest").unlink()
    put(store, red("fp8_block", started=""), run="when")
    assert judge(store, rules(others="close")).exit_code == CLOSED
    put(store, red("fp8_block"), run="when")
    put(store, good("fp8_block"), run="zzz")  # of the same second
    assert judge(store, rules(others="close")).exit_code == CLOSED


def test_slower_and_larger_than_the_baseline_closes_it(tmp_path: Path) -> None:
    store = fill(tmp_path)
    assert judge(store, baseline=BEFORE).open
    slow = Timing("bf16.forward", "cuda-events", (1.11, 1.11), 1.11, 0.0, 5)
    put(store, good("attention", timings=(slow,), peak_memory_mib=229.0))
    decision = judge(store, baseline=BEFORE)
    assert decision.exit_code == CLOSED
    assert decision.closing[0].rules == (GateRule.SLOWER, GateRule.MEMORY)
    assert [(row.module, row.cause.value) for row in decision.culprits] == [("attention", "performance")]
    just = replace(slow, rounds_ms=(1.1, 1.1), median_ms=1.1)
    host = replace(slow, clock="perf_counter", rounds_ms=(9.0, 9.0), median_ms=9.0)
    put(store, good("attention", timings=(just, host), peak_memory_mib=228.0))
    assert judge(store, baseline=BEFORE).open


@pytest.mark.parametrize(
    ("before", "now", "opens"),
    [(94.1, 139.2, True), (100.0, 228.0, True), (100.0, 228.1, False), (2000.0, 2200.0, True), (2000.0, 2201.0, False)],
)
def test_memory_that_may_come_and_go_closes_nothing(before: float, now: float, opens: bool, tmp_path: Path) -> None:
    baseline = replace(
        BEFORE, receipts={probe: good(probe, stack="te2.12.0", peak_memory_mib=before) for probe in PROBES}
    )
    decision = judge(fill(tmp_path, peak_memory_mib=now), baseline=baseline)
    assert decision.open is opens
    assert {rule for row in decision.closing for rule in row.rules} == (set() if opens else {GateRule.MEMORY})
    assert judge(tmp_path, rules(memory_floor_mib=0.0), baseline=baseline).open is (now <= 1.1 * before)


@pytest.mark.parametrize(
    "changes",
    [{"timings": ()}, {"peak_memory_mib": 0.0}, {"machine": Machine(gpu="NVIDIA H100", capability="9.0")}],
    ids=["no timings", "no memory", "another card"],
)
def test_a_baseline_that_cannot_be_compared_is_no_evidence(changes: dict[str, Any], tmp_path: Path) -> None:
    wanted = rules(baseline="required")
    store = fill(tmp_path)
    assert judge(store, wanted, baseline=BEFORE).open
    assert judge(store, wanted).exit_code == MISSING
    put(store, good("attention", **changes))
    decision = judge(store, wanted, baseline=BEFORE)
    assert decision.exit_code == MISSING
    assert {*decision.closing[0].rules} - {GateRule.TARGET} == {GateRule.BASELINE}  # two cards are that as well


def test_what_several_modules_meet_is_one_culprit(tmp_path: Path) -> None:
    twice = (Library("libnccl", "2.28.9", ("/env/libnccl.so.2", "/usr/lib/libnccl.so.2")),)
    store = fill(tmp_path)
    put(store, *(good(probe, libraries=twice) for probe in PROBES[:2]), good("permute", jit=compiled(triton=1)))
    decision = judge(store)
    assert [(row.module, row.cause.value, row.component, row.cascades) for row in decision.culprits] == [
        ("environment", "environment", "libnccl", PROBES[:2]),
        ("permute", "performance", "", ()),
    ]


def with_waiver(rule: GateRule, expires: date = TODAY) -> GateRules:
    waiver = ReleaseWaiver(
        release="te-upgrade", cell=CELL, rule=rule, owner="somebody", reason="known", link="https://example.org/1",
        expires=expires,
    )  # fmt: skip
    return rules().model_copy(update={"waivers": (waiver,)})


def test_a_waiver_holds_until_its_day_and_hides_nothing(tmp_path: Path) -> None:
    store = fill(tmp_path)
    put(store, red("attention"))
    decision = judge(store, with_waiver(GateRule.OUTCOME))
    assert decision.open
    assert not decision.waivers[0].in_vain
    held = next(row for row in decision.required if row.probe == "attention")
    assert (held.accepted, held.waived_by, held.rules) == (True, "somebody", (GateRule.OUTCOME,))
    assert decision.waivers[0].state is WaiverState.HOLDS
    decision = judge(store, with_waiver(GateRule.OUTCOME, TODAY - timedelta(days=1)))
    assert (decision.exit_code, decision.waivers[0].state) == (CLOSED, WaiverState.EXPIRED)
    decision = judge(store, with_waiver(GateRule.SLOWER))
    assert (decision.exit_code, decision.waivers[0].state) == (CLOSED, WaiverState.NOT_NEEDED)
    put(store, red("attention", jit=compiled(triton=1)))  # a second breakage, of which it says nothing
    assert judge(store, with_waiver(GateRule.OUTCOME)).exit_code == CLOSED


@pytest.mark.parametrize(
    "receipt",
    [
        red("attention", checks=(NOT_A_NUMBER,)),
        red("attention", outcome=Outcome.ERROR, failure=Failure("RuntimeError", "loss is NaN at step 3"), checks=()),
        red("attention", outcome=Outcome.IMPORT_ERROR, checks=()),
        red("attention", outcome=Outcome.ERROR, failure=Failure("ModuleNotFoundError", "no module 'x'"), checks=()),
        red("attention", outcome=Outcome.ERROR, failure=Failure("OSError", "te.so: undefined symbol: f"), checks=()),
        red("attention", checks=(replace(FAILED, detail="ImportError: cannot import name 'f'"),)),
        red("attention", outcome=Outcome.BLOCKED, blocked_by=f"{STACK}-{TARGET}-imports", checks=()),
        red("attention", outcome=Outcome.BLOCKED, blocked_by=f"{STACK}-{TARGET}-nothing", checks=()),
        red("attention", commit=OTHER_COMMIT),
        good("attention", outcome=Outcome.NOT_RUN, checks=()),
    ],
    ids=[
        "NaN",
        "NaN in words",
        "import",
        "import in the probe",
        "symbol in the probe",
        "import in a check",
        "blocked by an import",
        "blocked by nobody knows what",
        "no evidence either",
        "not run",
    ],
)
def test_no_waiver_holds_off_an_import_a_nan_or_missing_evidence(receipt: Receipt, tmp_path: Path) -> None:
    store = fill(tmp_path)
    put(store, receipt)
    if receipt.blocked_by.endswith("imports"):
        put(store, red("imports", outcome=Outcome.IMPORT_ERROR, checks=()))
    decision = judge(store, with_waiver(GateRule.OUTCOME))
    row = next(row for row in decision.required if row.probe == "attention")
    assert row.closes
    assert decision.waivers[0].in_vain is (GateRule.OUTCOME in row.rules and row.rules[0] is GateRule.OUTCOME)


def test_a_contradiction_is_waived_unless_it_is_of_an_import_or_nan(tmp_path: Path) -> None:
    store = fill(tmp_path)
    put(store, red("attention", hours=3.0), run="older")
    decision = judge(store)
    assert (decision.exit_code, decision.closing[0].rules) == (CLOSED, (GateRule.CONTRADICTED,))
    assert judge(store, with_waiver(GateRule.CONTRADICTED)).open
    for hard in ({"checks": (NOT_A_NUMBER,)}, {"outcome": Outcome.IMPORT_ERROR, "checks": ()}):
        put(store, red("attention", hours=3.0, **hard), run="older")
        assert judge(store, with_waiver(GateRule.CONTRADICTED)).exit_code == CLOSED


def test_the_same_store_and_time_give_the_same_bytes(tmp_path: Path) -> None:
    store = fill(tmp_path / "one")
    put(store, red("attention", hours=3.0), run="older")
    other = tmp_path / "two"
    shutil.copytree(store, other)
    os.utime(other / "run", (0, 0))
    first, second = judge(store), judge(other)
    assert first.model_dump_json() == second.model_dump_json() == judge(store).model_dump_json()
    assert GateDecision.model_validate_json(first.model_dump_json()) == first
    place(other, "permute").write_text(place(other, "permute").read_text() + "\n")
    assert judge(other).receipts_sha256 != first.receipts_sha256
    assert judge(store, rules(slowdown=1.2)).rules_sha256 != first.rules_sha256


def test_a_receipt_that_changes_while_it_is_read_is_none(tmp_path: Path) -> None:
    store = read_store(fill(tmp_path))
    place(tmp_path, "attention").write_text(json.dumps(asdict(red("attention"))))
    with pytest.raises(ReceiptInvalid, match="written while"):
        store.load(next(one for one in store.files if one.cell == CELL))
