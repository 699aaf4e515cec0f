"""A search for the first bad release in words."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from megacpp_validate.canary.dynamic.bisect import Verdict
from megacpp_validate.report.describe.bisect import describe_bisect
from megacpp_validate.report.render.markdown import render_markdown
from tests.canary.dynamic.test_bisect import Truth, find

NOT_BUILT = {(5,): Verdict.CANNOT_BUILD, (6,): Verdict.CANNOT_TELL}
CASES = {
    "found": ([12], Truth(({0: 7},))),
    "a range": ([12], Truth(({0: 7},), NOT_BUILT.get)),
    "another component": ([12, 4], Truth(({1: 2},))),
    "two together": ([6, 4], Truth(({0: 3, 1: 2},))),
    "each alone": ([6, 4], Truth(({0: 3}, {1: 2}))),
    "the good end is bad": ([4], Truth(({0: 0},))),
    "the bad end is good": ([4], Truth(())),
    "an end is not built": ([4], Truth(({0: 2},), {(3,): Verdict.CANNOT_BUILD}.get)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_search_in_words(name: str, snapshot: SnapshotAssertion) -> None:
    sizes, truth = CASES[name]
    found = find(sizes, truth).model_copy(update={"seconds": 1.0})
    assert render_markdown(describe_bisect(found)) == snapshot
