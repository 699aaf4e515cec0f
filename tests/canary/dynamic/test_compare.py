"""`compare` over every pair of outcomes, and of none."""

from __future__ import annotations

from itertools import product

import pytest

from megacpp_validate.canary.dynamic.step import compare
from megacpp_validate.canary.dynamic.upgrade_result import Change
from megacpp_validate.evidence.receipt import Outcome, Receipt
from tests.diagnosis.planted import blocked, cannot_import, dies, fails, good, keyword, not_run, raises

MADE: dict[Outcome | None, Receipt | None] = {
    None: None,
    Outcome.PASS: good("attention"),
    Outcome.EXPECTED_UNSUPPORTED: Receipt("c", "s", "h200", "attention", Outcome.EXPECTED_UNSUPPORTED, "", "te"),
    Outcome.FAIL: fails("attention", "bf16.a.forward"),
    Outcome.ERROR: raises("attention", *keyword("attention")),
    Outcome.IMPORT_ERROR: cannot_import(),
    Outcome.TIMEOUT: dies("attention", "timeout", "pytorch/a.py"),
    Outcome.BLOCKED: blocked("attention"),
    Outcome.NOT_RUN: not_run("attention"),
}
NONE = (None, Outcome.NOT_RUN)
GOOD = (Outcome.PASS, Outcome.EXPECTED_UNSUPPORTED)


def wanted(before: Outcome | None, after: Outcome | None) -> Change:
    if after in NONE:
        return Change.UNCHANGED if before in NONE else Change.LOST
    if before in NONE:
        return Change.NEW
    if (before, after) == GOOD:  # it passed, and shows no longer that it holds
        return Change.LOST
    if after in GOOD:
        return Change.UNCHANGED if before in GOOD else Change.FIXED
    if before in GOOD:
        return Change.REGRESSED
    if before == after:
        return Change.SAME_FAILURE
    return Change.LOST if after is Outcome.BLOCKED else Change.NEW


@pytest.mark.parametrize(("before", "after"), list(product(MADE, MADE)))
def test_the_whole_product(before: Outcome | None, after: Outcome | None) -> None:
    assert set(MADE) == {None, *Outcome}
    assert compare(MADE[before], MADE[after]) is wanted(before, after)


@pytest.mark.parametrize(("before", "after", "change"), [
    (raises("attention", "TypeError", "a"), raises("attention", "TypeError", "b"), Change.NEW),
    (raises("attention", "TypeError", "a"), raises("attention", "ValueError", "a"), Change.NEW),
    (raises("attention", "TypeError", "of 3 at 0x1f"), raises("attention", "TypeError", "of 4 at 0x2e"),
     Change.SAME_FAILURE),
    (fails("attention", "bf16.a.forward"), fails("attention", "bf16.b.forward", "bf16.c.forward"), Change.SAME_FAILURE),
    (fails("attention", "bf16.a.forward", "bf16.a.grad.query"), fails("attention", "bf16.a.forward"),
     Change.SAME_FAILURE),
    (fails("attention", "bf16.a.forward"), fails("attention", "bf16.a.forward", "fp32.a.forward"), Change.NEW),
    (fails("attention", "bf16.a.forward"), fails("attention", "bf16.a.dtype"), Change.NEW),
    (dies("attention", "SIGSEGV", "a.py"), dies("attention", "SIGSEGV", "b.py"), Change.NEW),
    (blocked("attention"), blocked("attention", text="another one"), Change.NEW),
])  # fmt: skip
def test_two_failures_are_one_by_their_signature(before: Receipt, after: Receipt, change: Change) -> None:
    assert compare(before, after) is change
