"""Checks that a good cell made under the release before, and does not make under this one: a skip is no success.

A probe of one commit makes the same checks in each release (docs/evidence: every pair of good cells). So one that is
not there was not looked at, whatever the outcome says.
"""

from __future__ import annotations

from typing import Final

from ...evidence.receipt import Outcome, Receipt

_TIMED: Final = "speed"  # first word of checks of a timed use (probes/stopwatch.py), which a run may leave out
_SHOWN: Final = 3


def find_lost_checks(before: Receipt, after: Receipt) -> tuple[str, ...]:
    """Names, in the order in which they were made; empty where other checks were to be expected.

    Those are of another commit, seed or path that was asked for, and of a second backend that the receipt says is not
    there now. A receipt of a run that only timed its module lacks all of them.
    """
    good = before.outcome is Outcome.PASS and after.outcome is Outcome.PASS
    alike = before.commit == after.commit != "" and before.seed == after.seed and before.requested == after.requested
    if not good or not alike:
        return ()
    made = {check.name for check in after.checks}
    absent = {row.requested for row in after.backends if not row.claimed and not row.observed}
    lost = (check.name for check in before.checks if check.name not in made)
    return tuple(name for name in lost if not absent & {*name.split(".")} and not name.startswith(f"{_TIMED}."))


def say_lost_checks(names: tuple[str, ...], stack: str) -> str:
    """A sentence of the cell that lacks them."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{stack} checked {', '.join(names[:_SHOWN])}{more}, and this receipt does not"
