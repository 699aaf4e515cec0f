"""What a run of many jobs tells while it goes on, and how patient it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...evidence.receipt import Receipt

What = Literal["kept", "given", "found", "runs", "again", "held", "silent", "ended"]


@dataclass(frozen=True)
class Rules:
    """How patient a run is; see `Cluster` for the first four."""

    retries: int = 2
    poll_s: float = 5.0
    grace_s: float = 15.0
    patience_s: float = 600.0
    wait_s: float = 0.0  # for all cells; 0 for as long as it takes
    fresh: bool = False


@dataclass(frozen=True)
class Told:
    """Something that became of a cell.

    Attributes:
        what: "kept" (a receipt of an earlier run), "given" (to the launcher), "found" (on its way since an earlier
            start), "runs", "again" (after a fault), "held", "ended".
        says: node, number, fault or reason.
        receipt: where it has one.
    """

    cell: str
    what: What
    says: str = ""
    receipt: Receipt | None = None
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class Done:
    """How a cell ended: its receipt, whether that is of an earlier run, and the node that it ran on."""

    receipt: Receipt
    kept: bool = False
    node: str = ""


Progress = Callable[[Told], None]
"""Called from the thread that runs the drive."""
