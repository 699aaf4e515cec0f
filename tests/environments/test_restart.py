"""What an earlier run left is taken again only if it answers the order."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megacpp_validate.environments.restart import FolderTaken, find_done, own_folder, why_run
from megacpp_validate.evidence.receipt import Check, Failure, Outcome, Receipt, Timing, write_receipt
from megacpp_validate.probes.order import Order, Target

ORDER = Order("permute", "te1", Target("cpu", ""), "native", seed=3, tool="tool 1", commit="c0", environment="e0")
DONE = Receipt(
    cell=ORDER.cell, stack="te1", target="cpu", probe="permute", outcome=Outcome.PASS, reason="", requested="native",
    checks=(Check("one", True),), seed=3, tool="tool 1", commit="c0", environment="e0",
)  # fmt: skip
TIMED = Timing("permute.forward", "perf_counter", (1.0, 1.0), 1.0, 0.0, 5)

STALE: dict[str, tuple[Order, Receipt, str]] = {
    "another-seed": (replace(ORDER, seed=4), DONE, "seed"),
    "another-request": (replace(ORDER, requested="te"), DONE, "request"),
    "another-tool": (replace(ORDER, tool="tool 2"), DONE, "tool"),
    "another-commit": (replace(ORDER, commit="c0-dirty"), DONE, "commit"),
    "another-environment": (replace(ORDER, environment="e1"), DONE, "environment"),
    "another-cell": (replace(ORDER, stack="te2"), DONE, "cell"),
    "of-no-known-environment": (replace(ORDER, environment=""), replace(DONE, environment=""), "unknown"),
    "not-run": (ORDER, replace(DONE, outcome=Outcome.NOT_RUN), "did not run"),
    "killed-by-somebody-else": (
        ORDER,
        replace(DONE, outcome=Outcome.ERROR, failure=Failure("SIGKILL", "nothing")),
        "SIGKILL",
    ),
    "a-batch-system-ended-it": (
        ORDER,
        replace(DONE, outcome=Outcome.ERROR, failure=Failure("SIGTERM", "nothing")),
        "SIGTERM",
    ),
    "the-disk-was-full": (
        ORDER,
        replace(DONE, outcome=Outcome.ERROR, reason="OSError: [Errno 28] No space left on device: '/tmp/x'"),
        "disk",
    ),
    "not-timed": (replace(ORDER, times=True), DONE, "no timings"),
}


@pytest.mark.parametrize(("order", "receipt", "words"), STALE.values(), ids=STALE)
def test_a_receipt_that_is_no_answer(order: Order, receipt: Receipt, words: str) -> None:
    assert words in why_run(order, receipt)


ANSWERS: dict[str, tuple[Order, Receipt]] = {
    "good": (ORDER, DONE),
    "bad": (ORDER, replace(DONE, outcome=Outcome.ERROR)),
    "timed": (replace(ORDER, times=True), replace(DONE, timings=(TIMED,))),
    "timed-and-nobody-asked": (ORDER, replace(DONE, timings=(TIMED,))),
    "crashed": (ORDER, replace(DONE, outcome=Outcome.ERROR, failure=Failure("SIGSEGV", "nothing"))),
    "red-and-so-not-timed": (replace(ORDER, times=True), replace(DONE, outcome=Outcome.TIMEOUT)),
    "nothing-to-time": (
        replace(ORDER, probe="composed", times=True),
        replace(DONE, probe="composed", cell="te1-cpu-composed"),
    ),
}


@pytest.mark.parametrize(("order", "receipt"), ANSWERS.values(), ids=ANSWERS)
def test_a_receipt_that_answers(order: Order, receipt: Receipt) -> None:
    assert why_run(order, receipt) == ""


def test_only_a_whole_receipt_is_taken_from_a_file(tmp_path: Path) -> None:
    place = tmp_path / f"{ORDER.cell}.json"
    assert find_done(ORDER, place) is None
    write_receipt(DONE, place)
    assert find_done(ORDER, place) == DONE
    text = place.read_text()
    for damaged in (text[: len(text) // 2], "", text.replace('"pass"', '"fine"'), text.replace("te1", "te2")):
        place.write_text(damaged)
        assert find_done(ORDER, place) is None


def test_a_second_run_is_refused_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "receipts"
    code = (
        "import sys, time; from pathlib import Path; from megacpp_validate.environments.restart import own_folder\n"
        "with own_folder(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        try:
            with pytest.raises(FolderTaken, match=r"receipts.*Next step"), own_folder(folder):
                pass
        finally:
            other.kill()
            other.wait()
    with own_folder(folder):
        pass
