"""Evidence that was made to look right: cells that nobody requires, baselines that are none, words for NaN, links."""

from __future__ import annotations

import inspect
import os
import stat
import sys
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.catalog.gate import ReleaseWaiver
from megacpp_validate.cli.gate.release_gate_telling import decision_text
from megacpp_validate.evidence.receipt import Backend, Failure, Machine, Outcome, Package, Receipt, Timing
from megacpp_validate.evidence.release_gate import GateCulprit, GateDecision, GateRule
from megacpp_validate.evidence.store import read_store
from megacpp_validate.gate.release import decide_release
from megacpp_validate.gate.release_asked import Asked, Baseline
from megacpp_validate.gate.release_checks import has_no_number
from tests.gate.release_receipts import (
    AT,
    COMMIT,
    PROBES,
    STACK,
    TARGET,
    compiled,
    fill,
    good,
    judge,
    place,
    put,
    red,
    rules,
)

CELL = f"{STACK}-{TARGET}-attention"
OTHER = "fp8_delayed"
CLOSED, MISSING = 1, 4
every_cell = partial(rules, others="close")


@pytest.mark.parametrize(
    ("receipt", "code"),
    [
        (red(OTHER, commit=f"{COMMIT}-dirty"), CLOSED),
        (red(OTHER, hours=3.0, outcome=Outcome.ERROR, checks=()), CLOSED),
    ],
    ids=["dirty", "red, then green"],
)
def test_a_red_cell_that_is_not_required_is_hidden_by_nothing(receipt: Receipt, code: int, tmp_path: Path) -> None:
    store = fill(tmp_path)
    put(store, receipt, run="other")
    if receipt.outcome is Outcome.ERROR:
        put(store, good(OTHER), run="newer")
    assert judge(store, every_cell()).exit_code == code


@pytest.mark.parametrize(
    "newer",
    [
        {"outcome": Outcome.NOT_RUN, "reason": "no GPU here", "checks": ()},
        {"seconds": {"speed": 1.0, "total": 9.0}},
    ],
    ids=["not run", "only timed"],
)
@pytest.mark.parametrize("outcome", [Outcome.ERROR, Outcome.TIMEOUT])
def test_what_judged_nothing_takes_no_red_cell_back(newer: dict[str, Any], outcome: Outcome, tmp_path: Path) -> None:
    """In another environment, where nothing contradicts: the newest that judged its cell is the red one."""
    store = fill(tmp_path)
    put(store, red(OTHER, outcome=outcome, checks=()), run="other")
    put(store, good(OTHER, hours=0.5, environment="f" * 64, **newer), run="newer")
    decision = judge(store, every_cell())
    assert (decision.exit_code, [row.run for row in decision.closing]) == (CLOSED, ["other"])
    (store / "other" / f"{STACK}-{TARGET}-{OTHER}.json").unlink()
    assert judge(store, every_cell()).open  # nor does it close by itself


def test_a_red_run_beside_a_green_one_is_blamed_as_a_whole_and_once(tmp_path: Path) -> None:
    """Of one run, and of one state that lies in two folders; another state is blamed by itself."""
    store = fill(tmp_path)
    error: dict[str, Any] = {"outcome": Outcome.ERROR, "checks": ()}
    put(store, red("attention", hours=5.0, **error), good("imports", hours=5.0), run="mon")
    put(store, red("layer_spec", hours=6.0, **error), red("attention", hours=9.0, **error), run="sun")
    put(store, red(OTHER, hours=7.0, environment="f" * 64, **error), run="fp8")
    put(store, good(OTHER, hours=2.0, environment="f" * 64), run="fp8-again")
    seen, asked = read_store(store), []

    def blame(receipts: Any) -> list[GateCulprit]:
        asked.append(sorted(one.probe for one in receipts))
        names = [one.probe for one in receipts if not one.outcome.is_good]
        return [GateCulprit(module=names[0], cause="api", cascades=tuple(names[1:]))]

    decision = decide_release(seen.files, seen.load, every_cell(), Asked(STACK, AT), blame=blame)
    assert [(row.module, row.cascades) for row in decision.culprits] == [(OTHER, ()), ("attention", ("layer_spec",))]
    assert sorted(asked) == [["attention", "imports", "layer_spec"], [OTHER]]


def test_a_mended_tree_is_not_said_to_come_and_go(tmp_path: Path) -> None:
    """Files differed from the commit: nobody knows whether they were the same both times. It is told."""
    dirty = f"{COMMIT}-dirty"
    store = fill(tmp_path, commit=dirty)
    put(store, red("attention", hours=3.0, commit=dirty), run="older")
    decision = judge(store)
    assert decision.open
    (older,) = (row for row in decision.cells if row.run == "older")
    assert (older.rules, "may have been mended" in older.warnings[0]) == ((GateRule.SUPERSEDED,), True)


@pytest.mark.parametrize("name", [f"{STACK}-{TARGET}-{OTHER}.json", "foo.json"])
def test_a_file_of_the_judged_stack_that_is_none_closes_where_every_cell_counts(name: str, tmp_path: Path) -> None:
    store = fill(tmp_path)
    put(store, red(OTHER), run="other")
    path = place(store, OTHER, "other")
    path.rename(path.with_name(name))
    if name != "foo.json":
        (path.with_name(name)).write_text("{")
    assert judge(store).open
    assert judge(store, every_cell()).exit_code == MISSING


def test_a_baseline_that_measured_nothing_is_none(tmp_path: Path) -> None:
    empty = {probe: good(probe, stack="te2.12.0", timings=(), peak_memory_mib=0.0) for probe in PROBES}
    baseline = Baseline("te2.12.0", empty, "0" * 64)
    decision = judge(fill(tmp_path), rules(baseline="required"), baseline=baseline)
    assert decision.exit_code == MISSING
    assert all(row.rules == (GateRule.BASELINE,) for row in decision.required)
    put(tmp_path, *(good(probe, timings=(), peak_memory_mib=0.0) for probe in PROBES))
    assert judge(tmp_path, rules(baseline="required"), baseline=baseline).exit_code == MISSING
    assert judge(tmp_path, baseline=baseline).open


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ({"peak_memory_mib": 0.0}, "measured no memory of it"),
        ({"timings": ()}, "measured no speed of it"),
        ({"timings": (Timing("fp32.forward", "cuda-events", (1.0,), 1.0, 0.0, 5),)}, "did not time bf16.forward"),
    ],
    ids=["memory", "speed", "one timing"],
)
@pytest.mark.parametrize("everywhere", [False, True])
def test_what_a_baseline_did_not_measure_is_told(
    lacks: dict[str, Any], says: str, everywhere: bool, tmp_path: Path
) -> None:
    before = {
        probe: good(probe, stack="te2.12.0", **(lacks if everywhere or probe == "permute" else {})) for probe in PROBES
    }
    slow = Timing("bf16.forward", "cuda-events", (90.0,), 90.0, 0.0, 5)
    large = {"peak_memory_mib": 90000.0} if "peak_memory_mib" in lacks else {"timings": (slow,)}
    put(fill(tmp_path), good("permute", **large))
    if everywhere:
        put(tmp_path, *(good(probe, **large) for probe in PROBES))
    baseline = Baseline("te2.12.0", before, "0" * 64)
    decision = judge(tmp_path, rules(baseline="required"), baseline=baseline)
    assert decision.exit_code == MISSING
    assert [row.probe for row in decision.closing] == (list(PROBES) if everywhere else ["permute"])
    assert all(set(row.rules) == {GateRule.BASELINE} and says in row.reasons[0] for row in decision.closing)
    decision = judge(tmp_path, baseline=baseline)
    told = {row.probe for row in decision.cells if any(says in warning for warning in row.warnings)}
    assert (decision.open, told) == (True, set(PROBES) if everywhere else {"permute"})


@pytest.mark.parametrize(
    "changes",
    [
        {"packages": (Package("transformer_engine", "2.17.1", "/env"),)},
        {"hours": 24 * 40.0},
        {"schema_id": "megacpp-validate/receipt/1"},
        {"machine": Machine(gpu="GB10", capability="12.1")},
    ],
    ids=["another release", "too old", "old schema", "another GPU"],
)
def test_what_is_no_evidence_names_nobody(changes: dict[str, Any], tmp_path: Path) -> None:
    store = fill(tmp_path)
    put(store, red("attention", **changes), good("permute", jit=compiled(triton=1), **changes))
    seen = read_store(store)

    def blame(receipts: Any) -> list[GateCulprit]:
        return [GateCulprit(module=one.probe, cause="api") for one in receipts if not one.outcome.is_good]

    asked = Asked(STACK, AT)
    decision = decide_release(seen.files, seen.load, rules(), asked, blame=blame)
    assert (decision.exit_code, decision.culprits) == (MISSING, ())


WORDS = (
    "NaNs in gradient", "Infs were found", "infinite loss", "grad_nan", "has_nan=True", "hasNaN", "got -inf",
    "1.#QNAN", "non-finite", "nonfinite values", "not a number", "assert torch.isfinite(loss)", "loss is nan at step 3",
)  # fmt: skip
OTHER_WORDS = ("info", "infer the shape", "nano", "tenant", "inference", "InfiniBand", "finite difference", "finance")


@pytest.mark.parametrize("message", WORDS + OTHER_WORDS)
def test_a_number_that_is_none_is_known_by_any_word(message: str) -> None:
    receipt = red("attention", outcome=Outcome.ERROR, checks=(), reason="", failure=Failure("RuntimeError", message))
    assert has_no_number(receipt) is (message in WORDS)


def test_no_waiver_holds_off_an_import_that_fails_otherwise_or_what_it_blocks(tmp_path: Path) -> None:
    store = fill(tmp_path)
    put(store, red("imports", outcome=Outcome.ERROR, checks=()))
    put(store, red("attention", outcome=Outcome.BLOCKED, blocked_by=f"{STACK}-{TARGET}-imports", checks=()))
    waiver = ReleaseWaiver(
        release="te-upgrade", cell=CELL, rule=GateRule.OUTCOME, owner="somebody", reason="known",
        link="https://example.org/1", expires=date(2027, 1, 1),
    )  # fmt: skip
    decision = judge(store, rules().model_copy(update={"waivers": (waiver,)}))
    assert {"imports", "attention"} <= {row.probe for row in decision.closing}


def test_a_slow_kernel_is_told_and_closes_nothing(tmp_path: Path) -> None:
    store = fill(tmp_path)
    ran = tuple(Backend(f"native_block.{name}", "te", "te", ("te", "unfused")) for name in ("bf16.gqa4", "fp32.gqa4"))
    put(store, good("native_block", backends=ran))
    decision = judge(store)
    told = [warning for row in decision.cells for warning in row.warnings if "unfused" in warning]
    assert (decision.open, len(told)) == (True, 1)
    assert told[0].startswith("native_block.bf16.gqa4 ran te, unfused: ")


def test_a_stack_of_a_name_of_its_own_can_open(tmp_path: Path) -> None:
    package = (Package("transformer_engine", "2.20.2", "/env"),)
    put(tmp_path, *(good(probe, stack="mine", packages=package) for probe in PROBES))
    assert judge(tmp_path, stack="mine").open
    put(tmp_path, good("attention", stack="mine", packages=()))
    assert judge(tmp_path, stack="mine").exit_code == MISSING


def test_a_negative_count_of_compiles_hides_no_other(tmp_path: Path) -> None:
    one = good("attention", jit=compiled(triton=5, other=-5))
    store = fill(tmp_path)
    seen = {file.cell: file for file in read_store(store).files}
    whole = {cell: read_store(store).load(file) for cell, file in seen.items()} | {CELL: one}
    decision = decide_release(
        seen.values(),
        lambda file: whole[file.cell], rules(), Asked(STACK, AT),
    )  # fmt: skip
    assert decision.exit_code == CLOSED


def test_folders_in_each_other_are_read_however_many(tmp_path: Path) -> None:
    store = fill(tmp_path)
    (store / "/".join(["a"] * 200)).mkdir(parents=True)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        assert len(read_store(store).files) == len(PROBES)
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("target", ["not-mounted", "itself", "x" * 300, ".hidden", "/"])
def test_a_link_behind_which_nobody_looks_closes_and_costs_no_other_answer(target: str, tmp_path: Path) -> None:
    store = fill(tmp_path)
    (store / "run" / "itself").symlink_to(target)
    (store / ".hidden").mkdir()
    (store / "notes").symlink_to(__file__)
    (store / "latest").symlink_to("run")  # whose receipts are read where they lie
    decision = judge(store)
    assert decision.exit_code == MISSING
    assert [row.cell for row in decision.closing] == ["itself"]
    assert "no part of the store" in decision.closing[0].reasons[0]
    (store / "run" / "itself").unlink()
    assert judge(store).open


def test_a_folder_that_cannot_be_read_closes_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may read everything, so the listing itself is refused."""
    store = fill(tmp_path)
    (store / "mon" / "night").mkdir(parents=True)
    real = os.scandir

    def refuse(folder: str) -> object:
        if folder.endswith("/night"):
            raise PermissionError(13, "Permission denied")
        return real(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    decision = judge(store)
    assert decision.exit_code == MISSING
    assert [(row.run, row.cell) for row in decision.closing] == [("mon", "night")]
    assert "the folder cannot be read: Permission denied" in decision.closing[0].reasons[0]


def test_a_device_is_no_receipt_and_is_not_read_to_its_end(tmp_path: Path) -> None:
    store = fill(tmp_path)
    place(store, "attention").unlink()
    try:
        os.mknod(place(store, "attention"), 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        os.mkfifo(place(store, "attention"))
    decision = judge(store)
    assert (decision.exit_code, decision.unreadable[0].reason) == (MISSING, "it is no regular file")


def test_names_that_are_no_text_are_told(tmp_path: Path) -> None:
    store = fill(tmp_path)
    with open(os.fsencode(store) + b"/\xff.json", "wb") as stream:  # noqa: PTH123 - no Path takes bytes
        stream.write(b"x")
    put(store, red("attention", reason="a\u202eb"))
    decision = judge(store)
    text = decision_text(decision)
    assert '"cell": "\\\\xff"' in text
    assert "\u202e" not in text
    assert GateDecision.model_validate_json(text) == decision
