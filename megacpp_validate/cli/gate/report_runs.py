"""The verb of the report: read a folder, judge its steps, write the pages, and say where they are."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...catalog.bridge import Catalog
from ...catalog.needs import read_needs
from ...evidence.receipt import Receipt
from ...evidence.store import read_receipt
from ...report.site import told as site_told
from ...report.site.folder import NotOurFolder, refuse_inside, refuse_other_folder, write_site
from ...report.site.results import MOST_RESULTS, has_page
from ...report.site.values import SiteFacts, SiteRow, arrange_stacks, plan_depths
from ...report.site.whole import Page, SiteOverview, SiteSource, render_site
from ...report.site_result import SiteResult
from ..app import TOOL, Exit, Format, foreseen, refuse
from ..output import refuse_among, write_told
from .report_sources import (
    DecisionInvalid,
    Judge,
    find_foreign,
    find_lost_rows,
    find_outdated,
    find_rates,
    find_scores,
    read_decisions,
    read_results,
    read_rows,
)


@dataclass(frozen=True)
class Asked:
    """The arguments.

    Attributes:
        store: folder of receipts.
        output: folder of the pages.
        gates: files of decisions.
        made_at: the report's clock, ISO 8601, UTC.
        matrix: folder of the matrix; the project's own without it.
    """

    store: Path
    output: Path
    gates: tuple[Path, ...]
    made_at: str
    matrix: Path | None = None


@foreseen({DecisionInvalid: Exit.WRONG_ARGUMENTS, NotOurFolder: Exit.WRONG_ARGUMENTS})
def run_report(catalog: Catalog, asked: Asked, fmt: Format, told: Path | None) -> None:
    """Write the site, and tell what is in it."""
    if not asked.store.is_dir():
        refuse(
            f"there is no folder {asked.store}. Likely cause: a typing error, or nothing has run here yet. Next step: "
            "give the folder of receipts; `nox -s cpu_parity` writes some to .megacpp/receipts.",
            Exit.WRONG_ARGUMENTS,
        )
    refuse_among(asked.store, told, "--told")
    refuse_inside(asked.output, filter(None, (told,)))  # before a minute's work, and before anything is replaced
    result = write_report(catalog, asked)
    write_told(
        (lambda console: site_told.render_site(result, console)) if fmt is Format.TABLE else None,
        lambda: _text(result, fmt),
        told,
        option="--told",
    )


def write_report(catalog: Catalog, asked: Asked) -> SiteResult:
    """Write the site of a store.

    Raises:
        DecisionInvalid: a file of `asked.gates` is none.
        NotOurFolder: there is something else than a site in the folder of the pages, or what is asked for lies in it.
    """
    started = time.monotonic()
    refuse_other_folder(asked.output)
    refuse_inside(asked.output, filter(None, (asked.store, *asked.gates)))
    facts, rows = _read(catalog, asked)

    def read(row: SiteRow) -> Receipt:
        return read_receipt(asked.store / row.path)

    judge = Judge(catalog, read_needs(list(facts.modules), asked.matrix), rows, asked.store)
    overview = SiteOverview()
    sizes: dict[str, int] = {}
    try:
        write_site(asked.output, _count(render_site(facts, SiteSource(read, judge), overview), sizes))
    except OSError as fault:
        _refuse_output(asked.output, fault)
    return SiteResult(
        tool=TOOL,
        store=facts.store,
        folder=str(asked.output),
        made_at=asked.made_at,
        receipts=facts.receipts,
        runs=facts.runs,
        cells=tuple(overview.cells),
        steps=tuple(overview.steps),
        unreadable=overview.unreadable,
        pages=len(sizes),
        size=sum(sizes.values()),
        first_page=sizes["index.html"],
        seconds=round(time.monotonic() - started, 2),
    )


def _read(catalog: Catalog, asked: Asked) -> tuple[SiteFacts, list[SiteRow]]:
    """What pages are made of, and a row a receipt."""
    gates = read_decisions(asked.gates)
    try:
        rows, unreadable, by_cell = read_rows(asked.store)
        results, read = read_results(asked.store, [*(row.path for row in rows), *unreadable])
        foreign = find_foreign(gates, asked.store, asked.gates)
    except OSError as fault:
        refuse(
            f"{asked.store} cannot be read: {fault.strerror or fault}. Likely cause: it is not yours. Next step: give "
            "a folder that you may read.",
            Exit.WRONG_ARGUMENTS,
        )
    if not rows and not unreadable:
        refuse(
            f"there is no receipt in {asked.store} or below it. Likely cause: it is another folder, or its run never "
            "began. Next step: give the folder that a run named in its last lines.",
            Exit.NOTHING_SELECTED,
        )
    lost = find_lost_rows(rows, by_cell, (target.id for target in catalog.targets))
    stacks = arrange_stacks([*rows, *lost], asked.made_at, by_cell)
    mutants = frozenset(mutant.id for mutant in catalog.mutants)
    rates = find_rates(read, mutants, asked.made_at)
    facts = SiteFacts(
        store=str(asked.store),
        tool=TOOL,
        made_at=asked.made_at,
        modules=tuple(module.id for module in catalog.modules),
        stacks=stacks,
        depths=plan_depths(stacks),
        unreadable=unreadable,
        results=results,
        told=dict([(file, one) for file, one in read.items() if has_page(one)][:MOST_RESULTS]),
        rates=rates,
        outdated=find_outdated(read, rates),
        scores=find_scores(read),
        mutants=mutants,
        gates=gates,
        foreign_gates=foreign,
    )
    return facts, rows


def _count(pages: Iterable[Page], sizes: dict[str, int]) -> Iterator[Page]:
    for path, text in pages:
        sizes[path] = len(text.encode("utf-8", "backslashreplace"))
        yield path, text


def _text(result: SiteResult, fmt: Format) -> str:
    match fmt:
        case Format.JSON:
            return result.model_dump_json(indent=2) + "\n"
        case Format.JUNIT:
            return site_told.render_site_junit(result)
        case Format.GITHUB:
            return site_told.render_site_annotations(result)
        case _:
            return site_told.render_site_summary(result)


def _refuse_output(folder: Path, fault: OSError) -> None:
    if fault.errno in (errno.ENOSPC, errno.EDQUOT):
        refuse(
            f"the report was given up: {fault}. Likely cause: the disk of {folder} is full. Next step: make room; what "
            "was there before is whole.",
            Exit.INFRASTRUCTURE,
        )
    refuse(
        f"the report cannot be written to {folder}: {fault.strerror or fault}. Likely cause: the place is not yours. "
        "Next step: give --output a folder that you can write; what was there before is whole.",
        Exit.WRONG_ARGUMENTS,
    )
