"""A good outcome over a failure, times below nothing, medians of other rounds: refused in full and at a glance."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.evidence.receipt import Failure, Outcome, Receipt, Timing, receipt_text
from megacpp_validate.evidence.store import ReceiptInvalid, parse_receipt
from megacpp_validate.probes.stopwatch import new_timing
from tests.stored_receipts import make_receipt

ROOT = Path(__file__).parents[2]
TIMED = make_receipt().timings[0]
SLOW = new_timing("forward", "cuda-events", (3.0, 3.75, 4.5), 10)


def good(**changes: Any) -> Receipt:
    return replace(make_receipt(), **changes)


CONTRADICTIONS: dict[str, tuple[Receipt, str]] = {
    "pass-over-a-failure": (good(failure=Failure("RuntimeError", "cuDNN Error")), "pass over the failure RuntimeError"),
    "pass-and-blocked": (good(blocked_by="te2.20.2-h200-imports"), "pass, and blocked by te2.20.2-h200-imports"),
    "unsupported-over-a-failure": (
        good(outcome=Outcome.EXPECTED_UNSUPPORTED, failure=Failure("RuntimeError", "x")), "over the failure",
    ),
    "a-phase-below-nothing": (good(seconds={"probe": -2.5, "total": 10.0}), "seconds.probe is -2.5"),
    "a-phase-below-nothing-in-a-red-one": (
        replace(make_receipt(Outcome.FAIL), seconds={"total": -0.001}), "seconds.total is -0.001",
    ),
    "a-median-divided": (good(timings=(replace(SLOW, median_ms=1.25),)), "the median of its 3 rounds"),
    "a-median-times-nine": (good(timings=(replace(TIMED, median_ms=11.25),)), "median_ms is 11.25"),
    "a-median-of-no-rounds": (good(timings=(replace(TIMED, rounds_ms=()),)), "of its 0 rounds"),
    "timed-twice": (good(timings=(SLOW, TIMED)), "forward is timed twice by cuda-events"),
}  # fmt: skip


@pytest.mark.parametrize(("receipt", "word"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_what_contradicts_itself_is_no_evidence(receipt: Receipt, word: str) -> None:
    with pytest.raises(ReceiptInvalid) as refused:
        parse_receipt(receipt_text(receipt).encode(), Path(f"{receipt.cell}.json"))
    assert word in refused.value.reason


def test_one_edited_word_makes_no_committed_receipt_good() -> None:
    red = [
        path
        for path in sorted((ROOT / "docs" / "evidence" / "h200").glob("te*/*.json"))
        if json.loads(path.read_text()).get("outcome") in ("error", "import-error", "blocked")
    ]
    assert len(red) >= 8
    for path in red:
        outcome = json.loads(path.read_text())["outcome"]
        text = path.read_text().replace(f'\n  "outcome": "{outcome}"', '\n  "outcome": "pass"').encode()
        with pytest.raises(ReceiptInvalid, match=r"over the failure|blocked by|no check at all|failed check"):
            parse_receipt(text, path)


# Of an even number the median is a mean of two, rounded after; a small one lies below what is rounded away.
@pytest.mark.parametrize(
    "rounds",
    [(1.2345678,), (0.1234565, 0.1234575), (1 / 3, 2 / 3, 1 / 7, 1 / 9), (4e-7, 6e-7), (12345.6789015, 12345.6789025),
     (50.1, 50.2, 50.3, 51.0, 49.9)],
)  # fmt: skip
def test_what_the_stopwatch_writes_is_read(rounds: tuple[float, ...]) -> None:
    both: tuple[Timing, ...] = tuple(new_timing("forward", clock, rounds, 9) for clock in ("cuda-events", "perf"))
    receipt = good(timings=both)
    path = Path(f"{receipt.cell}.json")
    assert parse_receipt(receipt_text(receipt).encode(), path) == receipt
