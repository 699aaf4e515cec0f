"""What is to be done next, from what is known: pure functions of jobs, receipts and sightings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ...evidence.receipt import Outcome, Receipt
from ...probes.order import Order
from ..plan import receipt_without_probe
from .launcher import Work
from .state import Fault, JobState

FIREWALL: Final = "imports"  # the probe that says whether Transformer Engine can be used at all


def find_ground(order: Order, planned: Mapping[str, Order]) -> tuple[str, ...]:
    """The cells that decide whether this one is run.

    A session on one machine runs every cell, and a probe that needs Transformer Engine where it cannot be imported says
    that it is blocked by the firewall's. No other cell blocks: who explains whom is for the canary to say, from
    receipts of all.

    Args:
        order: the cell.
        planned: every cell of the run.
    """
    if order.requested != "te" or not order.needs_te or order.probe == FIREWALL:
        return ()
    return tuple(
        cell
        for cell, other in planned.items()
        if other.probe == FIREWALL and (other.stack, other.target.id) == (order.stack, order.target.id)
    )


def find_blocker(work: Work, ended: Mapping[str, Receipt]) -> Receipt | None:
    """The ground that stands in the way; None where none does, or it is not known yet."""
    found = (ended.get(cell) for cell in work.ground)
    return next((one for one in found if one is not None and one.outcome is Outcome.IMPORT_ERROR), None)


def receipt_of_blocked(order: Order, blocker: Receipt) -> Receipt:
    """What the probe itself would have said, without a device for it."""
    blank = receipt_without_probe(order, Outcome.BLOCKED, f"blocked by {blocker.cell}: {blocker.reason}")
    return replace(blank, blocked_by=blocker.cell)


def order_starts(works: Sequence[Work]) -> tuple[Work, ...]:
    """Grounds first, then what takes longest; equals stay as they are."""
    grounds = {cell for work in works for cell in work.ground}
    return tuple(sorted(works, key=lambda work: (work.order.cell not in grounds, -work.seconds)))


def may_start(work: Work, ended: Collection[str]) -> bool:
    """Whether everything that it stands on has ended."""
    return all(cell in ended for cell in work.ground)


def is_given_up(job: JobState, retries: int) -> bool:
    """Whether infrastructure faults have ended more attempts than are made good."""
    return sum(fault.counts for fault in job.faults) > retries


def receipt_of_given_up(order: Order, faults: Sequence[Fault]) -> Receipt:
    """A cell that never came to an end."""
    times = sum(fault.counts for fault in faults)
    reason = f"given up after {times} infrastructure fault(s), the last: {faults[-1]}"
    return with_retries(receipt_without_probe(order, Outcome.NOT_RUN, reason), faults)


def receipt_of_never_come(order: Order, reason: str, faults: Sequence[Fault]) -> Receipt:
    """A cell that there was no time for."""
    return with_retries(receipt_without_probe(order, Outcome.NOT_RUN, reason), faults)


def with_retries(receipt: Receipt, faults: Sequence[Fault]) -> Receipt:
    """The receipt with every attempt before it."""
    return replace(receipt, retries=(*receipt.retries, *map(str, faults)))
