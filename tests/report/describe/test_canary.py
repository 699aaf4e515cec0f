"""What is said of damaged installs and of a search for the first bad release."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from megacpp_validate.canary.dynamic.bisect import Verdict
from megacpp_validate.canary.firewall.run import FirewallResult
from megacpp_validate.report.describe.canary import describe_bisect, describe_firewall
from megacpp_validate.report.marks import Tone
from megacpp_validate.report.render.markdown import render_markdown
from tests.canary.dynamic.test_bisect import Truth, find
from tests.report.describe.canary_results import CASES, FIREWALL
from tests.report.page import show_all

HOLDS = FirewallResult(tool="t", python="3", torch="", cases=(CASES[0],))
NONE = HOLDS.model_copy(update={"cases": ()})
NOT_RUN = HOLDS.model_copy(update={"cases": (CASES[0], CASES[3])})


FIREWALLS = {"fails": (FIREWALL, Tone.BAD), "holds": (HOLDS, Tone.GOOD), "not run": (NOT_RUN, Tone.MISSING),
             "none": (NONE, Tone.MISSING)}  # fmt: skip


@pytest.mark.parametrize("name", FIREWALLS)
def test_the_firewall_holds_only_where_every_case_does(name: str, snapshot: SnapshotAssertion) -> None:
    result, tone = FIREWALLS[name]
    document = describe_firewall(result)
    assert document.mark.tone is tone
    assert show_all(document) == snapshot


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
