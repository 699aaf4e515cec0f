"""What became of one cell between two stacks: one total function of two receipts."""

from __future__ import annotations

from ...evidence.receipt import Outcome, Receipt
from .signature import is_same, sign
from .upgrade_result import Change


def has_evidence(receipt: Receipt | None) -> bool:
    """Whether a receipt says anything of its cell: a missing one and one that was not run do not."""
    return receipt is not None and receipt.outcome is not Outcome.NOT_RUN


def is_red(receipt: Receipt | None) -> bool:
    """Whether a receipt says that its cell does not hold; a time limit and a blocked cell included."""
    return receipt is not None and has_evidence(receipt) and not receipt.outcome.is_good


def compare(before: Receipt | None, after: Receipt | None) -> Change:
    """What became of a cell.

    A blocked cell is as red as what blocks it: that failure is its own, too. Only where it had another one before is
    that one out of sight now, and so lost. What passed and now says that it is not supported shows no longer that it
    holds: that is lost as well, and why is for a person to judge.

    Args:
        before, after: of the same probe; None where there is no receipt that can be believed.
    """
    if after is None or not has_evidence(after):
        return Change.LOST if has_evidence(before) else Change.UNCHANGED
    if before is None or not has_evidence(before):
        return Change.NEW
    if before.outcome is Outcome.PASS and after.outcome is Outcome.EXPECTED_UNSUPPORTED:
        return Change.LOST
    if after.outcome.is_good:
        return Change.UNCHANGED if before.outcome.is_good else Change.FIXED
    if before.outcome.is_good:
        return Change.REGRESSED
    if is_same(sign(before), sign(after)):
        return Change.SAME_FAILURE
    hidden = after.outcome is Outcome.BLOCKED and before.outcome is not Outcome.BLOCKED
    return Change.LOST if hidden else Change.NEW
