"""What is said of damaged installs."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from megacpp_validate.canary.firewall.result import FirewallOutcome, FirewallResult
from megacpp_validate.report.describe.firewall import describe_firewall, split_reason, summarize_firewall
from megacpp_validate.report.marks import Tone
from megacpp_validate.report.render.terminal import render_terminal
from tests.report.describe.canary_results import CASES, FIREWALL

HOLDS = FirewallResult(tool="t", python="3", torch="", cases=(CASES[0],))
NONE = HOLDS.model_copy(update={"cases": ()})
NOT_RUN = HOLDS.model_copy(update={"cases": (CASES[0], CASES[3])})


@pytest.mark.parametrize(
    ("result", "tone", "summary"),
    [
        (FIREWALL, Tone.BAD, "The firewall in 5 cases: 3 pass, 1 fail, 1 not run."),
        (HOLDS, Tone.GOOD, "The firewall holds in 1 case."),
        (NOT_RUN, Tone.MISSING, "The firewall in 2 cases: 1 pass, 1 not run."),
        (NONE, Tone.MISSING, "No case ran: nothing is known about the firewall."),
    ],
)
def test_the_answer(result: FirewallResult, tone: Tone, summary: str) -> None:
    assert (describe_firewall(result).mark.tone, summarize_firewall(result)) == (tone, summary)


def test_every_case_is_judged_and_what_holds_is_one_row() -> None:
    document = describe_firewall(FIREWALL)
    assert [case.name for case in document.judged()] == [case.case for case in CASES]
    text = render_terminal(document)
    assert all(case.case in text for case in CASES)
    for case in CASES:
        assert (case.damage[:20] in text) is (case.outcome is not FirewallOutcome.PASS)


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


def test_the_words(snapshot: SnapshotAssertion) -> None:
    assert render_terminal(describe_firewall(FIREWALL)) == snapshot
