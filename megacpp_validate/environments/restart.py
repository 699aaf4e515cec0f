"""Receipts as the log of a run: one that answers an order is that cell done, and nothing else is.

So a run that was killed half way, by whatever, and is started again runs what is missing and nothing more.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ..catalog.file import PACKAGE_ROOT
from ..errors import InfrastructureFailed
from ..evidence.receipt import FROM_OUTSIDE, Outcome, Receipt
from ..evidence.store import ReceiptInvalid, read_receipt
from ..probes.order import Order

_LOCK: Final = ".lock"
_NO_SPACE: Final = os.strerror(errno.ENOSPC)


class FolderTaken(InfrastructureFailed):
    """Another run writes its receipts there."""


def why_run(order: Order, receipt: Receipt) -> str:
    """Why a receipt is no answer to an order, in words; empty where it is one."""
    asked = {
        "cell": order.cell,
        "seed": order.seed,
        "request": order.requested,
        "tool": order.tool,
        "commit": order.commit,
        "environment": order.environment,
    }
    found = {
        "cell": receipt.cell,
        "seed": receipt.seed,
        "request": receipt.requested,
        "tool": receipt.tool,
        "commit": receipt.commit,
        "environment": receipt.environment,
    }
    if other := [name for name, value in asked.items() if found[name] != value]:
        return f"its receipt is of another {', '.join(other)}"
    if not order.environment:
        return "nobody knows which environment its receipt is of"
    if receipt.outcome is Outcome.NOT_RUN:
        return "its receipt says that it did not run"
    if receipt.failure is not None and receipt.failure.type in FROM_OUTSIDE:
        return f"its process was ended by {receipt.failure.type}, which somebody else has sent"
    if _NO_SPACE in receipt.reason:
        return "the disk was full"
    if order.times and receipt.outcome is Outcome.PASS and not receipt.timings and _is_timed(order.probe):
        return "its receipt has no timings"
    return ""


def _is_timed(probe: str) -> bool:
    """Whether a module has anything to time."""
    return (PACKAGE_ROOT / "probes" / "speeds" / f"{probe}.py").is_file()


def find_done(order: Order, place: Path) -> Receipt | None:
    """The receipt of an earlier run that answers this order; None where there is none that can be believed."""
    try:
        receipt = read_receipt(place)
    except ReceiptInvalid:
        return None
    return None if why_run(order, receipt) else receipt


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Hold a folder of receipts against a second run, which would run the same cells again.

    The lock goes with the process, whatever kills it.

    Raises:
        FolderTaken: another run holds it.
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as fault:
            raise FolderTaken(
                f"another run writes its receipts to {folder}. Likely cause: it was started twice, or a first one was "
                "put in the background. Next step: wait for it, or give this one another folder with --receipts."
            ) from fault
        yield
