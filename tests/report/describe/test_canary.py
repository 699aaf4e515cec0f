"""What is said of damaged installs and of a search for the first bad release."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from megacpp_validate.canary.dynamic.bisect import Verdict
from megacpp_validate.canary.firewall.run import FirewallResult
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.report.describe.canary import describe_bisect, describe_firewall
from megacpp_validate.report.describe.receipt import split_reason
from megacpp_validate.report.marks import Tone
from megacpp_validate.report.render.markdown import render_markdown
from megacpp_validate.report.render.terminal import render_terminal
from tests.canary.dynamic.test_bisect import Truth, find
from tests.report.describe.canary_results import CASES, FIREWALL

HOLDS = FirewallResult(tool="t", python="3", torch="", cases=(CASES[0],))
NONE = HOLDS.model_copy(update={"cases": ()})
NOT_RUN = HOLDS.model_copy(update={"cases": (CASES[0], CASES[3])})


@pytest.mark.parametrize(
    ("result", "tone", "words"),
    [(FIREWALL, Tone.BAD, "fail: undefined-symbol"), (HOLDS, Tone.GOOD, "holds in 1 case"),
     (NOT_RUN, Tone.MISSING, "not run: flash-attn-4"), (NONE, Tone.MISSING, "none ran")],
)  # fmt: skip
def test_the_firewall_holds_only_where_every_case_does(result: FirewallResult, tone: Tone, words: str) -> None:
    document = describe_firewall(result)
    assert (document.mark.tone, words in document.summary) == (tone, True), document.summary
    assert [case.name for case in document.cases] == [case.case for case in result.cases]


def test_what_holds_is_one_row(snapshot: SnapshotAssertion) -> None:
    text = render_terminal(describe_firewall(FIREWALL))
    for case in CASES:
        assert (case.damage[:20] in text) is (case.outcome is not Outcome.PASS)
    assert text == snapshot


@pytest.mark.parametrize(
    ("reason", "parts"),
    [
        ("OSError: x. Likely cause: libcublas.so.13 is old. Next step: pip install it.",
         ("libcublas.so.13 is old", "pip install it")),
        ("turned off by MEGACPP. Next step: unset it.", ("turned off by MEGACPP.", "unset it")),
        ("only words", ("only words", "")),
    ],
)  # fmt: skip
def test_a_reason_names_cause_and_next_step(reason: str, parts: tuple[str, str]) -> None:
    assert split_reason(reason) == parts


NOT_BUILT = {(5,): Verdict.CANNOT_BUILD, (6,): Verdict.CANNOT_TELL}
SEARCHES = {
    "found": ([12], Truth(({0: 7},))),
    "a range": ([12], Truth(({0: 7},), NOT_BUILT.get)),
    "another component": ([12, 4], Truth(({1: 2},))),
    "two together": ([6, 4], Truth(({0: 3, 1: 2},))),
    "the good end is bad": ([4], Truth(({0: 0},))),
    "an end is not built": ([4], Truth(({0: 2},), {(3,): Verdict.CANNOT_BUILD}.get)),
}


def test_searches(snapshot: SnapshotAssertion) -> None:
    found = [find(sizes, truth).model_copy(update={"seconds": 1.0}) for sizes, truth in SEARCHES.values()]
    assert "\n\n".join(render_markdown(describe_bisect(one)) for one in found) == snapshot
