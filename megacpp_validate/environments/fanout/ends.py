"""How cells end, written down and told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ...evidence.receipt import Receipt
from ...evidence.receipt_file import write_receipt
from .events import Done, Progress, Told, What
from .launcher import Phase, Seen
from .state import Attempt, State

_ITS_TURN: Final = frozenset({"", "None", "Priority", "Resources", "BeginTime", "Prolog"})  # of every job's life


@dataclass
class Ends:
    """The cells of a run that have ended, and what was told of all.

    Attributes:
        folder: of the receipts.
        total: cells that the run has.
        progress: told what becomes of each cell.
        done: by cell.
    """

    folder: Path
    total: int
    progress: Progress
    done: dict[str, Done] = field(default_factory=dict)
    _told: set[tuple[str, str]] = field(default_factory=set)

    def end_with(self, state: State, receipt: Receipt) -> None:
        """End a cell that no process has a receipt of.

        Raises:
            OSError: the folder cannot be written.
        """
        write_receipt(receipt, self.folder / f"{receipt.cell}.json")
        self.end(state, receipt.cell, Done(receipt))

    def end(self, state: State, cell: str, done: Done) -> None:
        """End a cell whose receipt is in the folder."""
        self.done[cell] = done
        if (job := state.jobs.get(cell)) is not None:
            state.jobs[cell] = job.model_copy(update={"attempt": None})
        self.tell(cell, "kept" if done.kept else "ended", done.node, done.receipt)

    def tell(self, cell: str, what: What, says: str = "", receipt: Receipt | None = None) -> None:
        """Tell what became of a cell; of the whole run where the cell is empty."""
        self.progress(Told(cell, what, says, receipt, len(self.done), self.total))

    def tell_once(self, cell: str, attempt: Attempt, seen: Seen, node: str) -> None:
        """Tell that it runs, or what it waits for where that is not its turn."""
        state = attempt.name, "runs" if seen.phase is Phase.RUNS else seen.because
        if state in self._told or (seen.phase is Phase.QUEUED and seen.because in _ITS_TURN):
            return
        self._told.add(state)
        if seen.phase is Phase.RUNS:
            self.tell(cell, "runs", node)
        else:
            self.tell(cell, "held", f"the job {seen.id} waits: {seen.because}")
