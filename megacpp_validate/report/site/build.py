"""A store of receipts as a report: read each cell, judge the step between adjacent releases, write pages."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from megacpp_validate import TOOL
from megacpp_validate.evidence.receipt import Receipt

from ...canary.dynamic.slowdown import compare_timings, measure_noise
from ...canary.dynamic.step import StackReceipts, compare_stacks
from ...canary.dynamic.upgrade_result import StepResult
from ...catalog.bridge import Catalog
from ...catalog.images import Needs, read_needs
from ...errors import NothingSelected, WrongArguments, writing_to
from ...evidence.history import list_rows
from ...evidence.store import ReceiptInvalid, read_receipt, read_store
from ...gate.release import GateDecision
from ..describe.receipt import list_facts
from ..describe.training import find_main_runs
from ..describe.upgrade import name_culprit
from ..document import Document, Link
from ..render.html import render_page
from . import pages
from .cell_page import describe_cell
from .cells import CellHistory, arrange_cells, family, name_page
from .folder import require_site, write_site
from .pages import Site
from .result import SiteCell, SiteResult, SiteStep

_TITLES: Final = {
    "index.html": "Overview",
    "steps.html": "Blame",
    "gate.html": "Release gate",
    "training.html": "Training",
    "environments.html": "Environments",
    "files.html": "Files",
}


@dataclass(frozen=True)
class SiteOptions:
    """What a report is made of.

    Attributes:
        store: folder of receipts; each folder below it that holds some is a run.
        output: folder of the pages.
        gates: files of decisions of the release gate.
        made_at: time of the report, ISO 8601, UTC.
        matrix: folder of the matrix; the project's own without it.
    """

    store: Path
    output: Path
    gates: tuple[Path, ...]
    made_at: str
    matrix: Path | None = None


@dataclass
class _Stack:
    """Receipts of the bridge modules of one stack, and its cells without evidence."""

    target: str
    stack: str
    receipts: dict[str, Receipt] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)

    def add(self, cell: CellHistory, receipt: Receipt | None) -> None:
        """A cell, and its receipt if the cell is one of a module."""
        if cell.fault:
            self.unreadable[cell.cell] = cell.fault
        elif receipt is not None:
            self.receipts[cell.probe] = receipt
            if cell.doubt and cell.outcome.is_good:
                self.doubts[cell.cell] = f"{cell.doubt}: the newest receipt does not count as evidence"


def write_report(catalog: Catalog, options: SiteOptions) -> SiteResult:
    """Write the report of a store.

    Raises:
        WrongArguments: the store is no folder, a gate's file is no decision, or the output holds other files.
        NothingSelected: the store has no receipt.
        OSError: the disk is full.
    """
    started = time.monotonic()
    require_site(options.output, (options.store, *options.gates))
    if not options.store.is_dir():
        raise WrongArguments(
            f"there is no folder {options.store}. Likely cause: a typing error, or nothing has run here yet. Next "
            "step: give the folder of receipts; `nox -s cpu_parity` writes some to .megacpp/receipts."
        )
    rows = list_rows(read_store(options.store))
    if not rows:
        raise NothingSelected(
            f"there is no receipt in {options.store} or below it. Likely cause: the folder is another one, or no run "
            "wrote there. Next step: give the folder that a run named in its last lines."
        )
    site = Site(
        str(options.store),
        options.made_at,
        tuple(module.id for module in catalog.modules),
        arrange_cells(rows, options.made_at, (target.id for target in catalog.targets)),
        tuple(map(read_decision, options.gates)),
        {row.path: row.fault for row in rows if row.outcome is None},
    )
    html = _render_site(site, catalog, options)
    with writing_to(options.output, "pages", "--output"):
        size = write_site(options.output, html)
    steps = (
        SiteStep(
            target=step.target, before=step.before, after=step.after, lost=tuple(step.lost), page=pages.link_step(step),
            culprits=tuple(map(name_culprit, step.culprits)),
        )
        for step in site.steps
    )  # fmt: skip
    valid = [row for row in rows if row.outcome is not None]
    return SiteResult(
        tool=TOOL, store=site.store, folder=str(options.output), made_at=site.made_at, receipts=len(valid),
        runs=len({row.run for row in valid}), steps=tuple(steps), unreadable=site.unreadable, pages=len(html),
        size=size, cells=tuple(map(SiteCell.model_validate, site.cells)), seconds=round(time.monotonic() - started, 2),
    )  # fmt: skip


def read_decision(file: Path) -> GateDecision:
    """A decision of the release gate.

    Raises:
        WrongArguments: the file is none.
    """
    try:
        return GateDecision.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as fault:
        raise WrongArguments(
            f"{file} is not a decision of the release gate: {str(fault).splitlines()[0]}. Likely cause: it has another "
            "form, or was cut short. Next step: write it with `release-gate --format json --output FILE`."
        ) from fault


def _render_site(site: Site, catalog: Catalog, options: SiteOptions) -> dict[str, str]:
    """Path -> HTML. Each cell page is rendered while its receipt is read: receipts of two stacks are in memory."""
    html: dict[str, str] = {}
    needs = read_needs(list(site.modules), options.matrix)
    newer: _Stack | None = None
    for key, cells in site.grid.items():
        if newer and (newer.target, family(newer.stack)) != (key[0], family(key[1])):
            newer = None
        if not any(cell.has_page for cell in cells.values()):
            continue
        older = _Stack(*key)
        for probe, cell in cells.items():
            cells[probe], receipt = _read_cell(site, cell, options.store, html)
            older.add(cells[probe], receipt if probe in site.modules else None)
        if newer and newer.receipts and older.receipts:
            site.steps.append(_judge(older, newer, catalog, needs))
        if older.receipts or not newer:  # a step is judged across a stack without a receipt of a module
            newer = older
    documents = pages.describe_pages(site)
    links = [Link(title, path) for path, title in _TITLES.items() if path in documents]
    return html | {path: _render(path, page, links) for path, page in documents.items()}


def _judge(older: _Stack, newer: _Stack, catalog: Catalog, needs: Needs) -> StepResult:
    before, after = (
        StackReceipts(side.stack, tuple(side.receipts.values()), side.unreadable) for side in (older, newer)
    )
    timings = compare_timings(older.receipts, newer.receipts, measure_noise({}, {}))
    step = compare_stacks(before, after, catalog.modules, timings, target=newer.target, needs=needs)
    return step.model_copy(update={"lost": {**newer.doubts, **step.lost}})  # a step with a doubt breaks nothing


def _render(path: str, document: Document, links: list[Link]) -> str:
    root = "../" if "/" in path else ""
    return render_page(document, links=tuple(replace(link, target=f"{root}{link.target}") for link in links), here=path)


def _read_cell(site: Site, cell: CellHistory, store: Path, html: dict[str, str]) -> tuple[CellHistory, Receipt | None]:
    """A cell, its receipt if it can be shown, and the page in `html`; a receipt that cannot be shown is lost."""

    def render_cell(receipt: Receipt | None) -> str:
        """The page of one cell."""
        top = [Link("Overview", "index.html"), Link(cell.target, name_page("target", cell.target))]
        return _render(cell.page, describe_cell(cell, receipt), top)

    receipt = None
    try:
        if not cell.rows:
            raise ReceiptInvalid(Path(cell.lost[0]), site.unreadable[cell.lost[0]])
        receipt = read_receipt(store / cell.rows[0].path)
        page = render_cell(receipt)
    except (ReceiptInvalid, ArithmeticError, ValueError) as fault:  # a number such as 10**400 cannot be drawn
        receipt = None
        reason = fault.reason if isinstance(fault, ReceiptInvalid) else f"it cannot be shown: {fault!r}"
        cell = replace(cell, fault=reason, doubt="file lost")
        site.unreadable.update({row.path: reason for row in cell.rows[:1]})
        page = render_cell(None)
    html[cell.page] = page
    if receipt is not None:
        facts = site.facts.setdefault((cell.target, cell.stack), {})
        for name, value in list_facts(receipt):
            facts.setdefault(name, set()).add(value)
        site.runs += find_main_runs([receipt])
    return cell, receipt
