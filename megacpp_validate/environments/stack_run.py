"""One stack of a run over many stacks."""

from __future__ import annotations

from ..evidence.values import Frozen


class StackRun(Frozen):
    """One stack of a run.

    Attributes:
        environment: where it comes from.
        folder: of its receipts.
        ran, reused: cells that this run started, and cells whose receipts it found.
        problem: why it could not be made usable; empty where it could.
    """

    stack: str
    environment: str
    folder: str
    ran: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()
    problem: str = ""
