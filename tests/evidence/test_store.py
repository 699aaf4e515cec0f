"""Receipts: written whole or not at all, read back unchanged, and refused where they contradict themselves."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from megacpp_validate.cli.app import app
from megacpp_validate.evidence.parity import build_support
from megacpp_validate.evidence.receipt import (
    Backend,
    Check,
    Failure,
    JitCompiles,
    Library,
    Machine,
    Outcome,
    Package,
    Part,
    Receipt,
)
from megacpp_validate.evidence.receipt_file import receipt_text, write_receipt
from megacpp_validate.evidence.store import ReceiptInvalid, read_receipt, read_receipts, receipt_schema

ROOT = Path(__file__).parents[2]
FULL = Receipt(
    cell="te2.20.2-h200-attention",
    stack="te2.20.2",
    target="h200",
    probe="attention",
    outcome=Outcome.FAIL,
    reason="1 of 2 checks failed: bf16",
    requested="te",
    checks=(
        Check("fine", True, (Part("relative-error", 1e-3, 2e-3, True, "2 x ..."),)),
        Check("bf16", False, (Part("relative-error", 0.5, 2e-3, False, "2 x ..."),), "seen"),
    ),
    backends=(Backend("attention.bf16", "te", "sdpa", ("sdpa",), ("te: soft cap",)),),
    packages=(Package("torch", "2.11.0", "/site/torch/__init__.py", ("/other/torch/__init__.py",)),),
    libraries=(Library("libcudart", "13.0", ("/a", "/b")),),
    machine=Machine(gpu="NVIDIA H200", capability="9.0"),
    jit=JitCompiles({"triton": 3}, {}),
    failure=Failure("RuntimeError", "text", "te.py:1 in f", "Traceback"),
    seed=3,
    seconds={"total": 1.5},
    retries=("lost driver",),
)
NAME = f"{FULL.cell}.json"


def test_a_receipt_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_receipt(FULL, tmp_path / "new" / NAME)
    assert read_receipt(tmp_path / "new" / NAME) == FULL
    assert [path.name for path in (tmp_path / "new").iterdir()] == [NAME]


texts = st.text(max_size=30)
numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@given(reason=texts, observed=numbers, bound=numbers, seconds=st.dictionaries(texts, st.floats(0, 1e6), max_size=3))
def test_any_text_and_number_comes_back(
    reason: str,
    observed: float | None,
    bound: float | None,
    seconds: dict[str, float],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    checks = (Check(reason, False, (Part(reason, observed, bound, False, reason),), reason),)
    receipt = dataclasses.replace(FULL, reason=reason, checks=checks, seconds=seconds)
    place = tmp_path_factory.mktemp("any") / NAME
    write_receipt(receipt, place)
    assert read_receipt(place) == receipt


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_hold_is_null_and_half_a_character_costs_nothing(number: float, tmp_path: Path) -> None:
    checks = (Check("x", False, (Part("relative-error", number, 1.0, False, "d"),), "a \udcff b"),)
    write_receipt(dataclasses.replace(FULL, checks=checks), tmp_path / NAME)
    (check,) = read_receipt(tmp_path / NAME).checks
    assert check.parts[0].observed is None
    assert check.detail == r"a \udcff b"


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_receipt(FULL, tmp_path / NAME)

    def full_disk(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_receipt(dataclasses.replace(FULL, seed=4), tmp_path / NAME)
    assert read_receipt(tmp_path / NAME).seed == 3
    assert os.listdir(tmp_path) == [NAME]  # noqa: PTH208 - hidden files too


def changed(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.update(values)


def good_outcome(data: dict[str, Any]) -> None:
    data["outcome"] = "pass"


def green_check(data: dict[str, Any]) -> None:
    data["checks"][1]["passed"] = True


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "pass-over-a-failed-check": (good_outcome, "outcome pass with the failed check bf16"),
    "check-over-a-failed-part": (green_check, "check bf16 passed over its part relative-error"),
    "pass-without-checks": (changed(outcome="pass", checks=[]), "no check at all"),
    "fail-without-failed-check": (changed(checks=[]), "without a failed check"),
    "blocked-by-nothing": (changed(outcome="blocked"), "not by which cell"),
    "unknown-outcome": (changed(outcome="fine"), "outcome"),
    "unknown-key": (changed(colour="green"), "colour"),
    "another-cell": (changed(cell="te2.20.2-h200-permute"), "joined"),
    "another-stack": (changed(stack="te2.17.1"), "joined"),
    "another-schema": (changed(schema_id="megacpp-validate/receipt/3"), "schema_id"),
    "a-number-as-text": (changed(seed="3"), "seed"),
    "a-truth-as-number": (lambda data: data["checks"][0].update(passed=1), "passed"),
    "missing-key": (lambda data: data.pop("outcome"), "outcome"),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "word"), FAULTS.values(), ids=FAULTS)
def test_what_was_edited_is_no_evidence(fault: Callable[[dict[str, Any]], None], word: str, tmp_path: Path) -> None:
    data = json.loads(receipt_text(FULL))
    fault(data)
    (tmp_path / NAME).write_text(json.dumps(data))
    with pytest.raises(ReceiptInvalid) as refused:
        read_receipt(tmp_path / NAME)
    assert word in refused.value.reason
    assert NAME in str(refused.value)
    assert "Next step" in str(refused.value)


def test_a_renamed_file_is_no_evidence_for_its_name(tmp_path: Path) -> None:
    write_receipt(FULL, tmp_path / "te2.20.2-h200-permute.json")
    with pytest.raises(ReceiptInvalid, match="its name does not say"):
        read_receipt(tmp_path / "te2.20.2-h200-permute.json")


@given(cut=st.floats(0, 1, exclude_max=True))
def test_a_file_that_was_cut_short_is_refused(cut: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.mktemp("cut") / NAME
    text = receipt_text(FULL).rstrip()
    place.write_text(text[: int(len(text) * cut)])
    with pytest.raises(ReceiptInvalid):
        read_receipt(place)


def test_a_folder_is_read_with_what_is_unreadable_told_apart(tmp_path: Path) -> None:
    write_receipt(FULL, tmp_path / NAME)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "te2.20.2-h200-attention.log").write_text("words")
    receipts = read_receipts(tmp_path)
    assert list(receipts.found) == [FULL.cell]
    assert [fault.file.name for fault in receipts.unreadable] == ["broken.json", "folder.json"]
    with pytest.raises(ReceiptInvalid, match="no such folder"):
        read_receipts(tmp_path / "nowhere")


def test_the_first_schema_stays_readable(tmp_path: Path) -> None:
    data = json.loads(receipt_text(FULL))
    for key in ("timings", "environment"):
        del data[key]
    data["schema_id"] = "megacpp-validate/receipt/1"
    (tmp_path / NAME).write_text(json.dumps(data))
    read = read_receipt(tmp_path / NAME)
    assert (read.timings, read.environment, read.checks) == ((), "", FULL.checks)


def test_the_published_schema_is_fresh() -> None:
    """Written by `python -m megacpp_validate.cli receipt-schema >docs/schema/receipt.json`."""
    published = (ROOT / "docs" / "schema" / "receipt.json").read_text(encoding="utf-8")
    assert json.loads(published) == receipt_schema()
    assert CliRunner().invoke(app, ["receipt-schema"]).stdout == published


def row(stack: str, target: str = "h200", **outcomes: Outcome) -> list[Receipt]:
    return [
        dataclasses.replace(
            FULL, cell=f"{stack}-{target}-{probe}", stack=stack, target=target, probe=probe, outcome=outcome
        )
        for probe, outcome in outcomes.items()
    ]


def test_the_grid_has_a_row_a_stack_in_order_and_no_cell_is_left_out() -> None:
    receipts = [
        *row("te2.20.2", attention=Outcome.PASS),
        *row("te2.9.0", attention=Outcome.PASS, permute=Outcome.FAIL),
        *row("te2.12.0", "b200", permute=Outcome.PASS),
        *row("native", attention=Outcome.PASS),
    ]
    grid = build_support(receipts, ["attention", "permute"], {"x.json": "broken"})
    assert [(row.target, row.stack) for row in grid.rows] == [
        ("b200", "te2.12.0"), ("h200", "native"), ("h200", "te2.9.0"), ("h200", "te2.20.2"),
    ]  # fmt: skip
    assert [[cell.outcome.value for cell in row.cells] for row in grid.rows] == [
        ["not-run", "pass"], ["pass", "not-run"], ["pass", "fail"], ["pass", "not-run"],
    ]  # fmt: skip
    assert (grid.rows[2].cells[1].passed, grid.rows[2].cells[1].total) == (1, 2)
    assert grid.unreadable == {"x.json": "broken"}
