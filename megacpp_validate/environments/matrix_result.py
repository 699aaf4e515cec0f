"""What a run of many cells gave, and what it would be."""

from __future__ import annotations

from typing import Literal

from ..evidence.receipt import Outcome
from ..evidence.values import Frozen


class MatrixCell(Frozen):
    """How one cell of a run ended.

    Attributes:
        seconds: that its process took; 0 where none told.
        retries: every infrastructure fault before the last attempt, in words.
        kept: its receipt is of an earlier run.
        node: that it ran on; empty where nobody knows.
    """

    cell: str
    stack: str
    target: str
    probe: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    retries: tuple[str, ...] = ()
    kept: bool = False
    node: str = ""


class MatrixRun(Frozen):
    """A run of many cells, one job a cell.

    Attributes:
        launcher: "local" or "slurm".
        folder: of the receipts.
        seconds: wall-clock time of this start.
        cells: one for every cell that was selected, in the order of the plan.
    """

    schema_id: Literal["megacpp-validate/matrix/1"] = "megacpp-validate/matrix/1"
    tool: str
    launcher: str
    folder: str
    seconds: float
    cells: tuple[MatrixCell, ...]

    @property
    def holds(self) -> bool:
        """Whether every selected cell ran and is good."""
        return bool(self.cells) and all(cell.outcome.is_good for cell in self.cells)

    @property
    def breaks(self) -> bool:
        """Whether anything ran and is not good; what did not run at all is lost evidence, not a breakage."""
        return any(not cell.outcome.is_good and cell.outcome is not Outcome.NOT_RUN for cell in self.cells)


class PlannedCell(Frozen):
    """One cell that would be run.

    Attributes:
        gpus: that its job asks for.
        minutes: that its job may take.
        after: the cell that decides whether it is run.
        asks: options that the scheduler would be given; empty for a launcher that has none.
    """

    cell: str
    stack: str
    target: str
    probe: str
    gpus: int
    seconds: float
    limit_s: float
    after: str = ""
    asks: tuple[str, ...] = ()


class MatrixPlan(Frozen):
    """What would be run; nothing was started to know it."""

    schema_id: Literal["megacpp-validate/matrix-plan/1"] = "megacpp-validate/matrix-plan/1"
    tool: str
    launcher: str
    folder: str
    cells: tuple[PlannedCell, ...]
