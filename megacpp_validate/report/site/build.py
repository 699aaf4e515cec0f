"""A store of receipts as a report: read each cell, judge the step between adjacent releases, write pages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from megacpp_validate import TOOL

from ...canary.dynamic.slowdown import compare_timings, measure_noise
from ...canary.dynamic.step import StackReceipts, StepResult, compare_stacks
from ...catalog.bridge import Catalog
from ...catalog.images import Needs, read_needs
from ...errors import Exit, WrongArguments, writing_to
from ...evidence.history import read_history
from ...evidence.receipt import Outcome, Receipt, write_whole
from ...evidence.store import ReceiptInvalid, read_receipt
from ...evidence.values import Frozen
from ..describe.session import find_main_runs
from ..render.html import render_html
from . import pages
from .cells import Cell, arrange_cells, family
from .pages import Site

MARK: Final = ".megacpp-site"  # the file that lists the pages of a report


class SiteCell(Frozen):
    """The receipt of a cell that counts; `doubt`: why a good outcome is no evidence that the cell holds."""

    cell: str
    stack: str
    target: str
    outcome: Outcome
    page: str
    doubt: str = ""


class SiteResult(Frozen):
    """One report.

    Attributes:
        store, folder: of the receipts, and of the pages.
        receipts, runs: how many there are in the store.
        steps: between adjacent releases, the newest first.
        unreadable: file below the store -> what is wrong with it.
        pages: how many there are.
    """

    schema_id: Literal["megacpp-validate/site/2"] = "megacpp-validate/site/2"
    tool: str
    store: str
    folder: str
    receipts: int
    runs: int
    cells: tuple[SiteCell, ...]
    steps: tuple[StepResult, ...] = ()
    unreadable: dict[str, str] = Field(default_factory=dict)
    pages: int
    seconds: float

    @property
    def exit(self) -> Exit:
        """A report judges nothing: `release-gate` does."""
        return Exit.OPEN


@dataclass
class _Stack:
    """Receipts of the bridge modules of one stack, and its cells without evidence."""

    target: str
    stack: str
    receipts: dict[str, Receipt] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)


def write_report(catalog: Catalog, store: Path, output: Path, made_at: str, matrix: Path | None = None) -> SiteResult:
    """Write the report of a store.

    Args:
        store: folder of receipts; each folder below it that holds some is a run.
        output: folder of the pages.
        made_at: time of the report, ISO 8601, UTC.
        matrix: folder of the matrix; the project's own without it.

    Raises:
        WrongArguments: the store is no folder, or the output has pages of another hand.
        NothingSelected: the store has no receipt.
        OSError: the disk is full.
    """
    started = time.monotonic()
    history = read_history(store)
    modules = tuple(module.id for module in catalog.modules)
    site = Site(str(store), made_at, modules, arrange_cells(history.cells))
    site.unreadable = {row.path: row.fault for cell in history.cells for row in cell.rows if row.outcome is None}
    site.unreadable |= history.lost
    html = _render_site(site, read_needs(list(modules), matrix), catalog, store)
    with writing_to(output, "pages", "--output"):
        write_site(output, html)
    cells = tuple(
        SiteCell(cell=one.name, stack=one.row.stack, target=one.row.target, outcome=one.outcome, page=one.page,
                 doubt=one.doubt)
        for one in site.cells
    )  # fmt: skip
    runs = {row.run for cell in history.cells for row in cell.rows if row.outcome is not None}
    return SiteResult(
        tool=TOOL, store=site.store, folder=str(output), receipts=history.receipts, runs=len(runs), cells=cells,
        steps=tuple(site.steps), unreadable=site.unreadable, pages=len(html),
        seconds=round(time.monotonic() - started, 2),
    )  # fmt: skip


def write_site(folder: Path, html: Mapping[str, str]) -> None:
    """Write pages; those of an earlier report that are gone are removed, and no other file is touched.

    Raises:
        WrongArguments: a page would replace a file that no report wrote.
    """
    mark = folder / MARK
    earlier = mark.read_text(encoding="utf-8").splitlines() if mark.is_file() else []
    foreign = [path for path in html if path not in earlier and (folder / path).exists()]
    if foreign or folder.is_symlink():
        raise WrongArguments(
            f"a report would replace {folder / foreign[0] if foreign else folder}, which no report wrote. Likely "
            "cause: --output names the wrong folder. Next step: give a folder that does not exist, or one of a report."
        )
    write_whole(mark, "".join(f"{path}\n" for path in dict.fromkeys((*earlier, *html))))
    for path, text in html.items():
        write_whole(folder / path, text.encode("utf-8", "backslashreplace").decode())
    for path in earlier:
        if path not in html and path.endswith(".html") and ".." not in path:
            (folder / path).unlink(missing_ok=True)
    write_whole(mark, "".join(f"{path}\n" for path in html))


def _render_site(site: Site, needs: Needs, catalog: Catalog, store: Path) -> dict[str, str]:
    """Path -> HTML. Each cell page is rendered while its receipt is read: receipts of two stacks are in memory."""
    html: dict[str, str] = {}
    newer: _Stack | None = None
    for key, cells in site.grid.items():
        if newer and (newer.target, family(newer.stack)) != (key[0], family(key[1])):
            newer = None
        older = _Stack(*key)
        for probe, cell in cells.items():
            cells[probe], receipt = _read_cell(site, cell, store)
            html[cell.page] = render_html(pages.describe_cell(cells[probe], receipt), overview="../index.html")
            if probe in site.modules:
                _add(older, cells[probe], receipt)
        if newer and newer.receipts and older.receipts:
            site.steps.append(_judge(older, newer, catalog, needs))
        if older.receipts or not newer:  # a step is judged across a stack without a receipt of a module
            newer = older
    return {"index.html": render_html(pages.describe_overview(site)), **html}


def _read_cell(site: Site, cell: Cell, store: Path) -> tuple[Cell, Receipt | None]:
    """A cell and its receipt; a receipt that contradicts itself is lost."""
    try:
        receipt = read_receipt(store / cell.row.path)
    except ReceiptInvalid as fault:
        site.unreadable[cell.row.path] = fault.reason
        return replace(cell, fault=fault.reason, doubt="file lost"), None
    site.runs += find_main_runs([receipt])
    return cell, receipt


def _add(stack: _Stack, cell: Cell, receipt: Receipt | None) -> None:
    if receipt is None:
        stack.unreadable[cell.name] = cell.fault
        return
    stack.receipts[cell.row.probe] = receipt
    if cell.doubt and cell.outcome.is_good:
        stack.doubts[cell.name] = f"{cell.doubt}: the newest receipt does not count as evidence"


def _judge(older: _Stack, newer: _Stack, catalog: Catalog, needs: Needs) -> StepResult:
    before, after = (
        StackReceipts(side.stack, tuple(side.receipts.values()), side.unreadable) for side in (older, newer)
    )
    timings = compare_timings(older.receipts, newer.receipts, measure_noise({}, {}))
    step = compare_stacks(before, after, catalog.modules, timings, target=newer.target, needs=needs)
    return step.model_copy(update={"lost": {**newer.doubts, **step.lost}})  # a step with a doubt breaks nothing
