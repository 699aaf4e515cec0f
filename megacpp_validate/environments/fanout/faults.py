"""Why an attempt ended, told apart: an answer, whatever it is, or a named infrastructure fault, which is tried again.

A numeric failure, a crash and a cell that took too long are answers. Only what says nothing of the cell is a fault: a
node that was lost, a job that somebody cancelled, a process that somebody killed, a full disk.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from pathlib import Path
from typing import Final

from ...evidence.receipt import FROM_OUTSIDE, Outcome, Receipt
from ...evidence.store import ReceiptInvalid, read_receipt
from ...probes.order import Order
from .launcher import BATCH_LOG, CLAIM, NODE_FILE, Phase, Seen
from .state import Fault

_NO_SPACE: Final = os.strerror(errno.ENOSPC)
_NOT_STARTED: Final = "the process could not be started"  # as `environments.cell` says it
_LAST_WORDS: Final = 400  # characters
_OF_SLURM: Final = re.compile(r"slurmstepd\S*: error: \*\*\*")  # that the job was ended, which is known already
# Slurm's words (squeue(1), JOB STATE CODES) for ends that say nothing of what the job ran.
_WORDS: Final = {
    "NODE_FAIL": ("node-fail", "the node was lost"),
    "PREEMPTED": ("preempted", "another job took its place"),
    "CANCELLED": ("cancelled", "somebody cancelled the job"),
    "TIMEOUT": ("job-time-limit", "the job's time limit, which is longer than the cell's, was reached"),
    "DEADLINE": ("deadline", "the job's deadline passed"),
    "BOOT_FAIL": ("boot-fail", "the node did not start"),
    "OUT_OF_MEMORY": ("out-of-memory", "the job took more memory than it was given"),
    "REVOKED": ("revoked", "another cluster has it"),
}


def read_answer(order: Order, folder: Path) -> Receipt | None:
    """The receipt of an attempt, where it is whole and answers the order."""
    try:
        receipt = read_receipt(folder / f"{order.cell}.json")
    except ReceiptInvalid:
        return None
    asked = (order.cell, order.seed, order.requested, order.environment)
    found = (receipt.cell, receipt.seed, receipt.requested, receipt.environment)
    return receipt if found == asked else None


def find_fault(receipt: Receipt, node: str) -> Fault | None:
    """The infrastructure fault that a receipt tells of; None where it is an answer."""
    where = f" (node {node})" if node else ""
    if receipt.failure is not None and receipt.failure.type in FROM_OUTSIDE:
        says = f"its process was ended by {receipt.failure.type}, which somebody has sent{where}"
        return Fault(name="killed", says=says, node=node)
    if receipt.outcome is Outcome.NOT_RUN and _NO_SPACE in receipt.reason:
        return Fault(name="disk-full", says=f"{receipt.reason}{where}", node=node)
    if receipt.outcome is Outcome.NOT_RUN and receipt.reason.startswith(_NOT_STARTED):
        return Fault(name="not-started", says=f"{receipt.reason}{where}", node=node)
    return None


def name_fault(seen: Seen, folder: Path) -> Fault:
    """The fault of an attempt that is over, or gone, and left no receipt."""
    # Slurm adds who it was: "CANCELLED by 0", "CANCELLED+".
    word = (seen.word.split() or [""])[0].rstrip("+")
    name, says = _WORDS.get(word, ("", ""))
    if not name and seen.phase is Phase.GONE:
        name, says = "gone", "the job is not known any more and left no receipt"
    elif not name:
        name, says = "no-receipt", f"the job ended ({seen.word or 'nobody says how'}) and left no receipt"
    node = seen.node or read_node(folder)
    where = f" (node {node})" if node else ""
    because = f": {seen.because}" if seen.because not in ("", "None") else ""
    said = read_last_words(folder)
    spoken = f"; its last words: {said}" if said else ""
    return Fault(name=name, says=f"{says}{where}{because}{spoken}", node=node)


def read_node(folder: Path) -> str:
    """Where an attempt was begun; empty where it was not."""
    try:
        return (folder / CLAIM / NODE_FILE).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def read_last_words(folder: Path) -> str:
    """The end of what a job wrote to its standard streams."""
    try:
        said = (folder / BATCH_LOG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    spoken = [line for line in said.splitlines() if not _OF_SLURM.match(line)]
    return " ".join(" ".join(spoken).split())[-_LAST_WORDS:]


def claim(folder: Path) -> bool:
    """Take an attempt for oneself: whoever comes later, a job that was given twice for instance, leaves it alone.

    Raises:
        OSError: the folder is not there, or cannot be written.
    """
    try:
        (folder / CLAIM).mkdir()
    except FileExistsError:
        return False
    (folder / CLAIM / NODE_FILE).write_text(os.environ.get("SLURMD_NODENAME") or socket.gethostname(), encoding="utf-8")
    return True
