"""The restart rule: a receipt that answers an order is that cell done, and nothing else is.

So a run that was killed half way, by whatever, and is started again runs what is missing and nothing more. The rule has
a second half: what ended a cell from outside says nothing of the cell, so the cell may be run again. A numeric failure,
a crash and a cell that took too long are answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from ..catalog.file import PACKAGE_ROOT
from ..diagnosis.diagnose import NO_SPACE, find_retry_fault
from ..errors import InfrastructureFailed
from ..evidence.receipt import FROM_OUTSIDE, Outcome, Receipt
from ..evidence.store import ReceiptInvalid, read_receipt
from ..probes.order import Order
from .plan import receipt_without_probe


class FolderTaken(InfrastructureFailed):
    """Another run writes its receipts there."""


def why_run(order: Order, receipt: Receipt) -> str:
    """Why a receipt is no answer to an order, in words; empty where it is one."""
    wanted = {
        "cell": order.cell,
        "seed": order.seed,
        "request": order.requested,
        "tool": order.tool,
        "commit": order.commit,
        "environment": order.environment,
    }
    found = {"request": receipt.requested, **{name: getattr(receipt, name) for name in wanted if name != "request"}}
    if other := [name for name, value in wanted.items() if found[name] != value]:
        return f"its receipt is of another {', '.join(other)}"
    if not order.environment:
        return "the environment of its receipt is unknown"
    if receipt.outcome is Outcome.NOT_RUN:
        return "its receipt says that it did not run"
    if receipt.failure is not None and receipt.failure.type in FROM_OUTSIDE:
        return f"its process was ended from outside, by {receipt.failure.type}"
    if NO_SPACE in receipt.reason:
        return "the disk was full"
    if order.times and receipt.outcome is Outcome.PASS and not receipt.timings and _is_timed(order.probe):
        return "its receipt has no timings"
    return ""


def _is_timed(probe: str) -> bool:
    """Whether a module has anything to time."""
    return (PACKAGE_ROOT / "probes" / "speeds" / f"{probe}.py").is_file()


def find_done(order: Order, place: Path) -> Receipt | None:
    """The receipt of an earlier run that answers this order; None where there is none that is whole."""
    try:
        receipt = read_receipt(place)
    except ReceiptInvalid:
        return None
    return None if why_run(order, receipt) else receipt


def find_fault(receipt: Receipt) -> str:
    """The infrastructure fault in a receipt, as "name: what happened"; empty where the receipt is an answer."""
    fault = find_retry_fault(receipt)
    return f"{fault.name}: {fault.says}" if fault else ""


def receipt_of_given_up(order: Order, faults: Sequence[str]) -> Receipt:
    """A cell that never came to an end; its faults stand in the receipt."""
    reason = f"given up after {len(faults)} infrastructure fault(s), the last: {faults[-1]}"
    return replace(receipt_without_probe(order, Outcome.NOT_RUN, reason), retries=tuple(faults))


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Hold a folder of receipts against a second run, which would run the same cells again.

    The lock goes with the process, whatever kills it.

    Raises:
        FolderTaken: another run holds it.
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout as fault:
        raise FolderTaken(
            f"another run writes its receipts to {folder}. Likely cause: it was started twice, or a first one was put "
            "in the background. Next step: wait for it, or give this one another folder with --receipts."
        ) from fault
