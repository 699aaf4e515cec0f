"""What is said of one run of the watch, and of a new release."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from megacpp_validate.canary.dynamic.upgrade_result import UpgradeResult
from megacpp_validate.canary.watch import JudgedRelease, WatchResult
from megacpp_validate.canary.wheel_requirements import WheelRequirements
from megacpp_validate.report.describe.watch import describe_release, describe_watch
from megacpp_validate.report.marks import Tone
from megacpp_validate.report.render.markdown import render_markdown
from tests.report.describe.canary_results import CASCADE, FIREWALL


def run(*codes: int, **failed: str) -> WatchResult:
    rows = (
        JudgedRelease(version=f"2.2{at}.0", against="2.20.2", code=code, judged_at="2026-01-02", issue="issues/x.md")
        for at, code in enumerate(codes, start=1)
    )
    return WatchResult(
        tool="t", asked_at="2026-01-02", pinned="2.20.2", listed=31, judged=tuple(rows), failed=failed
    )  # fmt: skip


@pytest.mark.parametrize(
    ("result", "tone", "words"),
    [
        (run(), Tone.GOOD, "0 new releases; breaks the bridge: none;"),
        (run(0), Tone.GOOD, "1 new release; breaks the bridge: none;"),
        (run(0, 1), Tone.BAD, "2 new releases; breaks the bridge: 2.22.0;"),
        (run(0, te="no wheel"), Tone.MISSING, "without a verdict: 1;"),
    ],
)
def test_the_answer_of_a_run(result: WatchResult, tone: Tone, words: str) -> None:
    document = describe_watch(result)
    assert document.mark.tone is tone
    assert words in document.summary


def test_the_issue_of_a_release(snapshot: SnapshotAssertion) -> None:
    result = UpgradeResult(tool="t", target="", tiers=("static", "firewall"), static=(CASCADE,), firewall=FIREWALL)
    document = describe_release(
        result, "2.21.0", WheelRequirements(tool="t", te="2.21.0", cores=(), needs=(), unknown={})
    )
    assert (document.title, document.mark.tone) == ("Transformer Engine 2.21.0 against 2.20.2", Tone.BAD)
    assert render_markdown(document) == snapshot
