"""Faults of the host in a receipt: what ended a probe from outside of it says nothing of the module that it looked at.

Such a receipt is no evidence, of a breakage or of anything else.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Final, NamedTuple

from ..evidence.receipt import FROM_OUTSIDE, Outcome, Receipt
from .rows import HOST_FAULTS, OF_THE_PROGRAM

# As the launcher of ranks tells of a run (training/parallel/launch.py): all of them, and which one is at fault.
_AT_FAULT: Final = re.compile(r"At fault: rank (\d+(?:, \d+)*)\.")
_KILLED: Final = re.compile(r"^rank \d+ ended by (SIG(?:HUP|INT|KILL|TERM)|exit status (?:129|130|137|143))\b")
# What a shell or a container engine makes of a process that a signal ended: 128 and its number (SIGHUP, SIGINT,
# SIGKILL, SIGTERM). 139 is a segmentation fault, which is none.
_BY_NUMBER: Final = frozenset({"exit status 129", "exit status 130", "exit status 137", "exit status 143"})
_MIB: Final = {"bytes": 2.0**-20, "KiB": 2.0**-10, "MiB": 1.0, "GiB": 2.0**10}
NO_SPACE: Final = os.strerror(errno.ENOSPC)
NOT_STARTED: Final = "the process could not be started"  # as `environments.cell` reports it


class RetryFault(NamedTuple):
    """An infrastructure fault that an attempt may be repeated for: its name, and what happened."""

    name: str
    says: str


def find_host_fault(receipt: Receipt) -> str:
    """The fault of the host that a red receipt is red for; empty where it is good, or red for anything else.

    Checks that failed before count for themselves: where one of them is of no such fault, the receipt is not either.
    """
    outcome, failure = receipt.outcome, receipt.failure
    if outcome.is_good or outcome in (Outcome.NOT_RUN, Outcome.BLOCKED, Outcome.TIMEOUT):
        return ""
    found = [read_host_fault(check.detail) for check in receipt.checks if not check.passed]
    if outcome is not Outcome.FAIL:
        if failure is not None and failure.type in FROM_OUTSIDE | _BY_NUMBER:
            found.append(f"its process was ended from outside, by {failure.type}")
        else:
            found.append(read_host_fault(f"{failure.type}: {failure.message}" if failure else receipt.reason))
    return found[-1] if found and all(found) else ""


def find_retry_fault(receipt: Receipt) -> RetryFault | None:
    """The infrastructure fault that a job's receipt shows; None where the receipt is an answer and is kept."""
    if receipt.failure is not None and receipt.failure.type in FROM_OUTSIDE:
        return RetryFault("killed", f"its process was ended from outside, by {receipt.failure.type}")
    if receipt.outcome is Outcome.NOT_RUN and NO_SPACE in receipt.reason:
        return RetryFault("disk-full", receipt.reason)
    if receipt.outcome is Outcome.NOT_RUN and receipt.reason.startswith(NOT_STARTED):
        return RetryFault("not-started", receipt.reason)
    return None


def read_host_fault(text: str) -> str:
    """The fault of the host that "class: text" names; empty where it names none, or a fault of the program too."""
    text = _said_at_fault(text)
    if OF_THE_PROGRAM.search(text):
        return ""
    if killed := _KILLED.search(text):
        return f"a rank was ended from outside, by {killed[1]}"
    return next((row.says for row in HOST_FAULTS if re.search(row.pattern, text)), "") or _find_full_gpu(text)


def _said_at_fault(text: str) -> str:
    """Of a run of many ranks what is said of those at fault: the others only lost them."""
    named = _AT_FAULT.search(text)
    if named is None:
        return text
    ranks = named[1].replace(", ", "|")
    ended = re.findall(rf"^rank (?:{ranks}) (?:was ended|ended by) .*$", text, re.MULTILINE)
    said = re.search(rf"^rank (?:{ranks}) said last .*", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*ended, *([said[0]] if said else [])])


def _find_full_gpu(text: str) -> str:
    """Other processes have the GPU's memory: more of it than this one, which would fit if it were alone.

    As torch writes it (c10/cuda/CUDACachingAllocator.cpp). In a container its own process may be listed by a number,
    like the others: what it has beside torch's allocator is not known then, and nobody else is accused.
    """
    if "out of memory" not in text:
        return ""
    sizes = []
    for words in ("Tried to allocate ", r"total capaci?ty of ", "of which ", "this process has "):
        found = re.search(rf"{words}(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)", text)
        if found is None:
            return ""
        sizes.append(float(found[1]) * _MIB[found[2]])
    wanted, total, free, own = sizes
    others = total - free - own
    full = others > own and own + wanted <= total
    return f"other processes have {others / 1024:.1f} of the GPU's {total / 1024:.1f} GiB" if full else ""
