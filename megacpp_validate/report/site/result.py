"""What the verb `report` wrote, and what in it a person should look at first."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from ...errors import Exit
from ...evidence.receipt import Outcome
from ...evidence.values import Frozen


class SiteCell(Frozen):
    """The receipt of a cell that counts.

    Attributes:
        page: below the folder of the report.
        doubt: why a good outcome is no evidence that the cell holds; empty where there is none.
    """

    model_config = ConfigDict(from_attributes=True)

    cell: str
    stack: str
    target: str
    probe: str
    outcome: Outcome
    page: str
    doubt: str = ""


class SiteStep(Frozen):
    """The step between two adjacent releases.

    Attributes:
        culprits: empty where nothing is to blame.
        lost: cells of the newer release without evidence, which the release may break.
    """

    target: str
    before: str
    after: str
    culprits: tuple[str, ...]
    page: str
    lost: tuple[str, ...] = ()


class SiteResult(Frozen):
    """One report.

    Attributes:
        store: folder of the receipts.
        folder: of the pages.
        made_at: ISO 8601, UTC.
        receipts, runs: how many there are in the store.
        steps: between adjacent releases, the newest first.
        unreadable: file below the store -> what is wrong with it.
        pages, size: how many pages there are, and bytes of all files.
        seconds: wall-clock time of all.
    """

    schema_id: Literal["megacpp-validate/site/1"] = "megacpp-validate/site/1"
    tool: str
    store: str
    folder: str
    made_at: str
    receipts: int
    runs: int
    cells: tuple[SiteCell, ...]
    steps: tuple[SiteStep, ...] = ()
    unreadable: dict[str, str] = Field(default_factory=dict)
    pages: int
    size: int
    seconds: float

    @property
    def exit(self) -> Exit:
        """A report judges nothing: `release-gate` does."""
        return Exit.OPEN

    @property
    def not_good(self) -> tuple[SiteCell, ...]:
        """Cells without evidence that they hold."""
        return tuple(cell for cell in self.cells if cell.doubt or not cell.outcome.is_good)
