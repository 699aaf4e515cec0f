"""A store of receipts as a site: read one receipt at a time, judge the step between adjacent releases, write pages."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Final

from pydantic import ValidationError

from megacpp_validate import TOOL
from megacpp_validate.evidence.receipt import Receipt

from ...canary.dynamic.slowdown import CardNoise, compare_timings, measure_noise
from ...canary.dynamic.step import StackReceipts, compare_stacks
from ...canary.dynamic.upgrade_result import StepResult
from ...catalog.bridge import Catalog
from ...catalog.needs import Needs, read_needs
from ...environments.stacks import AGAIN
from ...errors import NothingSelected, WrongArguments
from ...evidence.history import HistoryRow, list_rows
from ...evidence.receipts_manifest import hash_manifest
from ...evidence.store import ReceiptInvalid, ReceiptStore, read_receipt, read_store
from ...gate.decision import GateDecision
from ..describe.gate import describe_gate
from ..describe.receipt import list_facts
from ..describe.training import find_main_runs
from ..describe.upgrade import name_culprit
from ..document import Document, Link
from ..reading import describe_result, read_result
from ..render.html import render_page
from . import pages
from .cell_page import describe_cell
from .folder import name_page, require_outside, require_site, write_site
from .history import CellHistory, StackHistory, arrange_stacks, choose_full, family
from .result import SiteCell, SiteResult, SiteStep

# What drawing numbers raises that no run can have seen, and that no schema refuses: 10**400 parameters.
_UNDRAWN: Final = (ArithmeticError, ValueError)
_MOST_RESULTS: Final = 100  # files that are looked into
Page = tuple[str, str]


@dataclass(frozen=True)
class SiteOptions:
    """What a report is made of.

    Attributes:
        store: folder of receipts; each folder below it that holds some is a run.
        output: folder of the pages.
        gates: files of decisions of the release gate.
        made_at: the report's clock, ISO 8601, UTC.
        matrix: folder of the matrix; the project's own without it.
    """

    store: Path
    output: Path
    gates: tuple[Path, ...]
    made_at: str
    matrix: Path | None = None


@dataclass
class _Stack:
    """What was read of one stack: the newest receipt of each bridge module, and cells without evidence."""

    stack: str
    receipts: dict[str, Receipt] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)


def write_report(catalog: Catalog, options: SiteOptions) -> SiteResult:
    """Write the site of a store.

    Raises:
        WrongArguments: the store is no folder, a gate's file is no decision, or the output holds other files.
        NothingSelected: the store has no receipt.
        OSError: the disk is full.
    """
    started = time.monotonic()
    require_site(options.output)
    require_outside(options.output, (options.store, *options.gates))
    builder = _Builder(catalog, options)
    try:
        sizes = write_site(options.output, builder.render())
    except OSError as fault:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # the command line says what to do about a full disk; an earlier report is unchanged
        raise WrongArguments(
            f"the report cannot be written to {options.output}: {fault}. Likely cause: you may not write there. "
            "Next step: give --output a folder that you can write; an earlier report is unchanged."
        ) from fault
    site = builder.site
    cells = [cell for stack in site.stacks for cell in stack.cells.values()]
    return SiteResult(
        tool=TOOL,
        store=site.store,
        folder=str(options.output),
        made_at=site.made_at,
        receipts=sum(row.outcome is not None for row in builder.rows),
        runs=len({row.run for row in builder.rows if row.outcome is not None}),
        cells=tuple(
            SiteCell(
                cell=cell.cell,
                stack=cell.stack,
                target=cell.target,
                probe=cell.probe,
                outcome=cell.outcome,
                page=site.page_of(cell),
                doubt=cell.doubt,
            )
            for cell in cells
        ),
        steps=tuple(
            SiteStep(
                target=step.target,
                before=step.before,
                after=step.after,
                culprits=tuple(map(name_culprit, step.culprits)),
                page=pages.link_step(step),
                lost=tuple(step.lost),
            )
            for step in site.steps
        ),
        unreadable=site.unreadable,
        pages=len(sizes),
        size=sum(sizes.values()),
        first_page=sizes["index.html"],
        seconds=round(time.monotonic() - started, 2),
    )


class _Builder:
    """Pages that come one after the other: those of cells while their receipts are read, then those about all."""

    def __init__(self, catalog: Catalog, options: SiteOptions) -> None:
        self.catalog, self.options = catalog, options
        self.modules = tuple(module.id for module in catalog.modules)
        self.needs: Needs = read_needs(list(self.modules), options.matrix)
        self.store = _read_store(options.store)
        self.rows = list_rows(self.store)
        _require_receipts(options.store, self.rows)
        stacks = arrange_stacks(self.rows, options.made_at, (target.id for target in catalog.targets))
        self.site = pages.Site(str(options.store), options.made_at, self.modules, list(stacks), choose_full(stacks))
        self.site.unreadable = {row.path: row.fault for row in self.rows if row.outcome is None}
        self.site.gates = list(_read_gates(options, self.store))
        self.noise: dict[str, CardNoise] = {}

    def render(self) -> Iterator[Page]:
        """Every page with its path."""
        site = self.site
        waiting: list[Page] = []
        newer: tuple[StackHistory, _Stack] | None = None
        for number, stack in enumerate(site.stacks):
            if (stack.target, stack.stack) not in site.full:
                continue
            seen = _Stack(stack.stack)
            cells = {probe: self._read_cell(cell, seen, waiting) for probe, cell in stack.cells.items()}
            site.stacks[number] = replace(stack, cells=cells)
            beside = newer and (newer[0].target, family(newer[0].stack)) == (stack.target, family(stack.stack))
            if newer and beside and seen.receipts and newer[1].receipts:
                site.steps.append(self._judge(stack.target, seen, newer[1]))
            if seen.receipts or not beside:  # a step is judged across a stack of which no module was read
                newer = stack, seen
            yield from waiting
            waiting.clear()
        yield from self._render_results()
        yield from self._render_tops()

    def _read_cell(self, cell: CellHistory, seen: _Stack, waiting: list[Page]) -> CellHistory:
        receipt: Receipt | None = None
        try:
            if cell.lost:
                raise ReceiptInvalid(Path(cell.unreadable[0]), self.site.unreadable[cell.unreadable[0]])
            receipt = read_receipt(self.options.store / cell.rows[0].path)
            waiting.append(_render_cell(cell, receipt))
        except (ReceiptInvalid, *_UNDRAWN) as fault:
            receipt = None
            reason = fault.reason if isinstance(fault, ReceiptInvalid) else f"it cannot be shown: {fault!r}"
            cell = replace(cell, fault=reason)
            seen.unreadable[cell.cell] = reason
            if cell.rows:
                self.site.unreadable[cell.rows[0].path] = reason
            waiting.append(_render_cell(cell, None))
        if receipt is not None:
            facts = self.site.environments.setdefault((cell.target, cell.stack), {})
            for name, value in list_facts(receipt):
                facts.setdefault(name, set()).add(value)
            self.site.runs += find_main_runs([receipt])
            if cell.probe in self.modules:
                seen.receipts[cell.probe] = receipt
                if cell.doubt and receipt.outcome.is_good:
                    seen.doubts[cell.cell] = f"{cell.doubt}: its newest receipt does not settle it"
        return cell

    def _render_results(self) -> Iterator[Page]:
        """Results of other verbs that lie beside the receipts."""
        others = [one for one in self.store.files if one.other]
        for one in others[:_MOST_RESULTS]:
            try:
                result = read_result((self.options.store / one.file).read_bytes())
                if result.schema_id == "megacpp-validate/score/1":
                    continue  # its links lead from the folder of the project
                document = describe_result(result)
                page = self._render(name_page("result", one.shown), document)
            except (OSError, *_UNDRAWN):
                continue  # of a later version, or nothing that a verb describes: a cache of kernels has thousands
            self.site.results[page[0]] = one.shown
            yield page

    def _render_tops(self) -> Iterator[Page]:
        site = self.site
        for target in site.targets:
            yield self._render(name_page("target", target), pages.describe_target(site, target))
        yield self._render("index.html", pages.describe_overview(site))
        if site.steps:
            yield self._render("steps.html", pages.describe_steps(site))
        if site.gates:
            yield self._render("gate.html", pages.describe_gates(site))
        if site.runs:
            yield self._render("training.html", pages.describe_runs(site))
        if site.environments:
            yield self._render("environments.html", pages.describe_environments(site))
        yield self._render("files.html", pages.describe_files(site))

    def _render(self, path: str, document: Document) -> Page:
        root = "../" if "/" in path else ""
        links = tuple(replace(link, target=f"{root}{link.target}") for link in pages.list_pages(self.site))
        return path, render_page(document, links=links, here=path)

    def _judge(self, target: str, older: _Stack, newer: _Stack) -> StepResult:
        """The step between two stacks, against the noise of the card where a stack was timed twice in one run."""
        if target not in self.noise:
            self.noise[target] = self._measure_noise(target)
        before, after = (
            StackReceipts(side.stack, tuple(side.receipts.values()), side.unreadable) for side in (older, newer)
        )
        timings = compare_timings(older.receipts, newer.receipts, self.noise[target])
        step = compare_stacks(before, after, self.catalog.modules, timings, target=target, needs=self.needs)
        # Nothing else is blamed for a doubt, and no step with one breaks nothing.
        return step.model_copy(update={"lost": {**newer.doubts, **step.lost}}) if newer.doubts else step

    def _measure_noise(self, target: str) -> CardNoise:
        """From the newest run that was timed again: the run, and its folder `again`."""
        rows = [row for row in self.rows if row.target == target and row.outcome is not None]
        known = {(row.run, row.probe): row.sha256 for row in rows}
        # A copy of the first run in the place of a second one would show a card without any noise.
        again = [
            row
            for row in rows
            if PurePosixPath(row.run).name == AGAIN and known.get((_first_run(row), row.probe)) != row.sha256
        ]
        newest = max(again, key=lambda row: (row.started, row.run), default=None)
        if newest is None:
            return measure_noise({}, {})
        return measure_noise(self._read_run(rows, _first_run(newest)), self._read_run(again, newest.run))

    def _read_run(self, rows: Iterable[HistoryRow], run: str) -> dict[str, Receipt]:
        found = {}
        for row in rows:
            if row.run == run:
                try:
                    found[row.probe] = read_receipt(self.options.store / row.path)
                except ReceiptInvalid:
                    continue  # its own page says so
        return found


def _render_cell(cell: CellHistory, receipt: Receipt | None) -> Page:
    links = (Link("Overview", "../index.html"), Link(cell.target, f"../{name_page('target', cell.target)}"))
    return name_page("cell", cell.cell), render_page(describe_cell(cell, receipt), links=links)


def _first_run(row: HistoryRow) -> str:
    return row.run.rpartition("/")[0] or "."


def _read_store(store: Path) -> ReceiptStore:
    """Every file of the store."""
    if not store.is_dir():
        raise WrongArguments(
            f"there is no folder {store}. Likely cause: a typing error, or nothing has run here yet. Next step: give "
            "the folder of receipts; `nox -s cpu_parity` writes some to .megacpp/receipts."
        )
    return read_store(store)


def _require_receipts(store: Path, rows: Sequence[HistoryRow]) -> None:
    if not rows:
        raise NothingSelected(
            f"there is no receipt in {store} or below it. Likely cause: the folder is another one, or no run wrote "
            "there. Next step: give the folder that a run named in its last lines."
        )


def _read_gates(options: SiteOptions, store: ReceiptStore) -> Iterator[tuple[GateDecision, Document, bool]]:
    """Each decision, the decision in words, and whether it was made of other receipts than the store has."""
    known = _hash_folders(store, options.gates) if options.gates else set()
    for file in options.gates:
        decision = read_decision(file)
        yield decision, describe_gate(decision), decision.receipts_sha256 not in known


def read_decision(file: Path) -> GateDecision:
    """A decision of the release gate.

    Raises:
        WrongArguments: the file is none.
    """
    try:
        return GateDecision.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as fault:
        raise WrongArguments(
            f"{file} is no decision of the release gate: {str(fault).splitlines()[0]}. Likely cause: it has another "
            "form, or was cut short. Next step: write it with `release-gate --format json --output FILE`."
        ) from fault


def _hash_folders(store: ReceiptStore, decisions: Iterable[Path]) -> set[str]:
    """The manifest's hash of the store and of each folder below it, without files of decisions."""
    own = {file.resolve() for file in decisions}
    folders: dict[str, dict[str, str]] = {}
    for file, sha256 in store.hashes.items():
        if (store.folder / file).resolve() in own:
            continue
        for folder in PurePosixPath(file).parents:
            below = file if str(folder) == "." else file.removeprefix(f"{folder}/")
            folders.setdefault(str(folder), {})[below] = sha256
    return {hash_manifest(hashes) for hashes in folders.values()}
