"""A store of receipts as a report: read each cell, judge the step between adjacent releases, write pages."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from ...canary.dynamic.slowdown import compare_timings
from ...canary.dynamic.step import StackReceipts, StepResult, compare_stacks
from ...catalog.bridge import Catalog
from ...catalog.images import Needs, read_needs
from ...errors import WrongArguments, writing_to
from ...evidence.history import read_history
from ...evidence.receipt import Outcome, Receipt, write_whole
from ...evidence.store import ReceiptInvalid, read_receipt
from ...evidence.values import Result
from ..describe.session import find_main_runs
from ..render.html import render_html
from . import pages
from .cells import LOST, Cell, arrange_cells, family

_Read = tuple[Cell, Receipt | None]
MARK: Final = ".megacpp-site"  # the file that lists the pages of a report


class SiteResult(Result):
    """One report.

    Attributes:
        store, folder: of the receipts, and of the pages.
        receipts, runs: how many there are in the store.
        steps: between adjacent releases, the newest first.
        unreadable: file below the store -> what is wrong with it.
        pages: how many there are.
    """

    schema_id: Literal["megacpp-validate/site/3"] = "megacpp-validate/site/3"
    store: str
    folder: str
    receipts: int
    runs: int
    cells: tuple[Cell, ...]
    steps: tuple[StepResult, ...] = ()
    unreadable: dict[str, str] = Field(default_factory=dict)
    pages: int
    seconds: float

    @property
    def lacks(self) -> bool:
        """Whether a file of the store cannot be read."""
        return bool(self.unreadable)


def write_report(catalog: Catalog, store: Path, output: Path, made_at: str) -> SiteResult:
    """Write the report of a store.

    Args:
        store: folder of receipts; each folder below it that holds some is a run.
        output: folder of the pages.
        made_at: time of the report, ISO 8601, UTC.

    Raises:
        WrongArguments: the store is no folder, or the output has pages of another hand.
        NothingSelected: the store has no receipt.
        OSError: the disk is full.
    """
    started = time.monotonic()
    history = read_history(store)
    files = [row for rows in history.cells.values() for row in rows]
    unreadable = dict(history.unreadable)
    modules = [module.id for module in catalog.modules]
    needs = read_needs(catalog)
    cells: list[Cell] = []
    steps: list[StepResult] = []
    runs: list[pages.Run] = []
    html: dict[str, str] = {}
    for _, releases in groupby(arrange_cells(history.cells.values()), lambda cell: (cell.target, family(cell.stack))):
        newer: list[_Read] = []
        for _, release in groupby(releases, lambda cell: cell.stack):
            read = [_read_cell(cell, store, unreadable) for cell in release]
            for cell, receipt in read:  # rendered at once: the receipts of two stacks are in memory
                cells.append(cell)
                html[cell.page] = render_html(pages.describe_cell(cell, receipt, unreadable), overview="../index.html")
                runs += [(cell, receipt, run) for run in find_main_runs(receipt) if receipt]
            older = [(cell, receipt) for cell, receipt in read if cell.probe in modules]
            if _has_receipt(newer) and _has_receipt(older):
                steps.append(_judge(older, newer, unreadable, catalog, needs))
            if _has_receipt(older) or not newer:  # a step is judged across a stack without a receipt of a module
                newer = older
    result = SiteResult(
        store=str(store), folder=str(output), receipts=history.receipts,
        runs=len({row.run for row in files if row.outcome is not None}), cells=tuple(cells), steps=tuple(steps),
        unreadable=unreadable, pages=len(html) + 1, seconds=round(time.monotonic() - started, 2),
    )  # fmt: skip
    overview = render_html(pages.describe_overview(result, modules, runs, made_at))
    with writing_to(output, "pages", "--output"):
        write_site(output, {"index.html": overview, **html})
    return result


def write_site(folder: Path, html: Mapping[str, str]) -> None:
    """Write pages; those of an earlier report that are gone are removed, and no other file is touched.

    Raises:
        WrongArguments: a page would replace a file that no report wrote.
    """
    mark = folder / MARK
    earlier = mark.read_text(encoding="utf-8").splitlines() if mark.is_file() else []
    for path in html:
        if path not in earlier and (folder / path).exists():
            raise WrongArguments(
                f"a report would replace {folder / path}, which no report wrote. Likely cause: --output names the "
                "wrong folder. Next step: give a folder that does not exist, or one of a report."
            )
    for path in {*earlier} - html.keys():
        (folder / path).unlink(missing_ok=True)
    write_whole(mark, "".join(f"{path}\n" for path in html))
    for path, text in html.items():
        write_whole(folder / path, text.encode("utf-8", "backslashreplace").decode())


def _read_cell(cell: Cell, store: Path, unreadable: dict[str, str]) -> _Read:
    """A cell and its receipt; a receipt that contradicts itself is lost."""
    try:
        return cell, read_receipt(store / cell.path)
    except ReceiptInvalid as fault:
        unreadable[cell.path] = fault.reason
        return cell.model_copy(update={"outcome": Outcome.NOT_RUN, "doubt": LOST}), None


def _has_receipt(cells: Sequence[_Read]) -> bool:
    return any(receipt for _, receipt in cells)


def _judge(
    older: Sequence[_Read], newer: Sequence[_Read], unreadable: Mapping[str, str], catalog: Catalog, needs: Needs
) -> StepResult:
    before, after = (
        StackReceipts(
            side[0][0].stack,
            tuple(receipt for _, receipt in side if receipt),
            {cell.cell: unreadable[cell.path] for cell, receipt in side if not receipt},
        )
        for side in (older, newer)
    )
    target = newer[0][0].target
    timings = compare_timings(before.select(target), after.select(target), {})
    step = compare_stacks(before, after, catalog.modules, timings, target=target, needs=needs)
    doubts = {
        cell.cell: f"{cell.doubt}: the newest receipt does not count as evidence"
        for cell, _ in newer
        if cell.doubt and cell.outcome.is_good
    }
    return step.model_copy(update={"lost": {**doubts, **step.lost}})  # a step with a doubt breaks nothing
