"""How often a cell goes bad by itself.

A flake is a cell with one stack (the identity of its environment, image and lock) and one commit that came out both
good and bad: no part of the stack or of this tool had changed between. The rate is over every state that was observed
more than once: bad observations in states that were good as well, by all observations. A state that was always bad is
a breakage and no flake, and counts as observations that did not flake.

What is no observation is left out: cells that were blocked or not run, unreadable receipts, copies of a receipt,
receipts that tell one process in two ways, and receipts that only timed a module and judged nothing of it. Receipts
that name no stack or no commit belong to no state, and neither do those of a checkout whose files differed from its
commit: nobody knows by how much. They are counted apart, because a rate that says nothing of them would look better
than it is. The seed is not part of a state: a cell that fails with some seeds fails without a change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ..evidence.history import FlakeRate, HistoryRow
from ..evidence.receipt import Outcome
from ..evidence.selftest import wilson_interval
from .release_asked import DIRTY


def rate_flakes(cell: str, rows: Iterable[HistoryRow]) -> FlakeRate:
    """The flake rate of one cell, with its 95% Wilson interval; the order of rows does not matter."""
    states: dict[tuple[str, ...], list[bool]] = defaultdict(list)
    unbound = 0
    for row in rows:
        if row.cell != cell or not row.counts or row.outcome in (None, Outcome.BLOCKED, Outcome.NOT_RUN):
            continue
        if row.environment and row.commit and not row.commit.endswith(DIRTY):
            states[(row.environment, row.image_digest, row.lock_hash, row.commit)].append(row.outcome.is_good)
        else:
            unbound += 1
    repeated = [state for state in states.values() if len(state) > 1]
    flaky = [state for state in repeated if any(state) and not all(state)]
    runs, flakes = sum(map(len, repeated)), sum(state.count(False) for state in flaky)
    low, high = wilson_interval(flakes, runs)
    return FlakeRate(
        cell=cell,
        states=len(repeated),
        flaky_states=len(flaky),
        runs=runs,
        flakes=flakes,
        rate=flakes / runs if runs else None,
        low=low,
        high=high,
        unbound=unbound,
    )
