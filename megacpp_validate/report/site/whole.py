"""A report site as pages that come one after the other: receipts are read one at a time, and let go of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from megacpp_validate.evidence.receipt import Outcome, Receipt
from megacpp_validate.evidence.store import ReceiptInvalid

from ...canary.dynamic.upgrade_result import StepResult
from ..site_result import SiteCell, SiteStep
from ..words.upgrade import say_culprit
from . import pages as site_pages
from .cell_page import TrainedRun, draw_trained
from .environments import Environment, read_facts
from .marks import FILE_LOST
from .paths import cell_page, result_page, stack_page, step_page, target_page
from .results import render_result
from .values import Depth, SiteFacts, SiteRow, StackHistory, family

Page = tuple[str, str]
# What drawing numbers raises that no run can have seen, and that no schema refuses: 10**400 parameters.
_UNDRAWN: Final = (ArithmeticError, ValueError)


@dataclass(frozen=True)
class SiteSource:
    """Where the pages of a site get what is no row of the history.

    Attributes:
        read: a receipt in full; raises `ReceiptInvalid` where its file is none.
        judge: the step between two stacks on a target: (target, older, newer) with their receipts by module.
    """

    read: Callable[[SiteRow], Receipt]
    judge: Callable[[str, StackSeen, StackSeen], StepResult]


@dataclass
class SiteOverview:
    """What is in a site, for whoever only asks where to look first; filled while the pages are made."""

    cells: list[SiteCell] = field(default_factory=list)
    steps: list[SiteStep] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)


@dataclass
class StackSeen:
    """What was read of one stack on one target.

    Attributes:
        receipts: the newest of each bridge module.
        environments: of every cell.
        unreadable: cell -> what is wrong with its newest receipt.
        doubts: cell of a module -> why its newest receipt, which is good, does not settle that it holds.
    """

    stack: str
    receipts: dict[str, Receipt] = field(default_factory=dict)
    environments: list[Environment] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)


@dataclass
class _Told:
    """What pages about many cells are made of, gathered while cells are written."""

    stacks: list[StackHistory] = field(default_factory=list)
    steps: list[StepResult] = field(default_factory=list)
    pairs: list[tuple[list[Environment], list[Environment]]] = field(default_factory=list)
    environments: list[Environment] = field(default_factory=list)
    trained: list[TrainedRun] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)

    def keep_trained(self, runs: Sequence[TrainedRun]) -> None:
        """The run that a cell is about, of the newest cells: a drawing is large."""
        self.trained += runs[:1]
        if len(self.trained) > 2 * site_pages.MOST_TRAINED:
            self.trained.sort(key=lambda run: run.started, reverse=True)
            del self.trained[site_pages.MOST_TRAINED :]


def render_site(facts: SiteFacts, source: SiteSource, overview: SiteOverview) -> Iterator[Page]:
    """Every page with its path: those of cells and steps as their receipts are read, then those about all of them.

    A receipt that turns out to be none where it is read in full is no evidence: its cell is shown as such everywhere.
    """
    told = _Told()
    results = []
    for file, result in facts.told.items():
        try:
            yield result_page(file), render_result(result)
        except _UNDRAWN as fault:
            told.unreadable[file] = _say_undrawn(fault)
        else:
            results.append(file)
    newer: StackSeen | None = None
    before: StackHistory | None = None  # the stack that was read last, which is newer, or of another target or family
    for stack in facts.stacks:
        seen = StackSeen(stack.stack)
        yield from _render_cells(facts, stack, source, seen, told)
        beside = before and before.target == stack.target and family(before.stack) == family(stack.stack)
        if newer and beside:
            yield from _render_step(facts, stack.target, source, (seen, newer), told)
        if seen.receipts or not beside:  # the blame is judged across a stack of which no module was read
            newer, before = seen, stack
    whole = replace(
        facts,
        stacks=tuple(told.stacks),
        unreadable={**facts.unreadable, **told.unreadable},
        told={file: facts.told[file] for file in results},
    )
    _fill(overview, whole, told.steps)
    for target in whole.targets:
        yield target_page(target), site_pages.render_target(whole, target)
    yield "index.html", site_pages.render_index(whole, told.steps)
    yield "steps.html", site_pages.render_steps(whole, told.steps)
    yield "gate.html", site_pages.render_gate(whole)
    yield "training.html", site_pages.render_training(whole, told.trained)
    yield "trends.html", site_pages.render_trends(whole)
    yield "environments.html", site_pages.render_environments(whole, told.environments, told.pairs)
    yield "score.html", site_pages.render_score(whole)
    yield "files.html", site_pages.render_files(whole)
    yield from site_pages.render_assets()


def _render_cells(
    facts: SiteFacts, stack: StackHistory, source: SiteSource, seen: StackSeen, told: _Told
) -> Iterator[Page]:
    depth = facts.depths.get((stack.target, stack.stack), Depth.FULL)
    cells = dict(stack.cells)
    for probe, history in stack.cells.items():
        if depth is Depth.LISTED or (depth is Depth.JUDGED and probe not in facts.modules):
            continue
        row = history.newest
        try:
            receipt = _read(row, facts, source)
            runs = draw_trained(history, receipt) if depth is Depth.FULL else ()
            page = site_pages.render_cell(facts, history, receipt, runs) if depth is Depth.FULL else ""
            environment = _environment(row, receipt)
        except (ReceiptInvalid, *_UNDRAWN) as fault:
            reason = fault.reason if isinstance(fault, ReceiptInvalid) else _say_undrawn(fault)
            told.unreadable[row.path] = seen.unreadable[row.cell] = reason
            lost = replace(row, outcome=Outcome.NOT_RUN, lost=True)
            cells[probe] = replace(history, rows=(lost, *history.rows[1:]))
            if depth is Depth.FULL:
                missing = f"{row.path} is no receipt: {reason}"
                yield cell_page(row.cell), site_pages.render_cell(facts, cells[probe], None, (), missing)
            continue
        seen.environments.append(environment)
        if probe in facts.modules:
            seen.receipts[probe] = receipt
            if history.doubt and receipt.outcome.is_good:
                seen.doubts[row.cell] = f"{history.doubt}: its newest receipt does not settle it"
        if depth is Depth.FULL:
            told.keep_trained(runs)
            yield cell_page(row.cell), page
    whole = replace(stack, cells=cells)
    if depth is not Depth.FULL:
        yield stack_page(stack.target, stack.stack), site_pages.render_stack(facts, whole)
    else:
        told.environments += seen.environments
    told.stacks.append(whole)


def _read(row: SiteRow, facts: SiteFacts, source: SiteSource) -> Receipt:
    if row.lost:  # the index could not read it either: it may be something that is better not opened again
        raise ReceiptInvalid(Path(row.path), facts.unreadable.get(row.path, "it could not be read"))
    return source.read(row)


def _say_undrawn(fault: Exception) -> str:
    return f"it cannot be shown: {type(fault).__name__}: {fault}"


def _render_step(
    facts: SiteFacts, target: str, source: SiteSource, sides: tuple[StackSeen, StackSeen], told: _Told
) -> Iterator[Page]:
    older, newer = sides
    if not (older.receipts and newer.receipts):
        return
    step = source.judge(target, older, newer)
    if newer.doubts:  # nobody else is blamed for it, and it is never said that the step breaks nothing
        step = step.model_copy(update={"lost": {**newer.doubts, **step.lost}})
    told.steps.append(step)
    if facts.depths.get((target, older.stack), Depth.FULL) is Depth.FULL:
        told.pairs.append((older.environments, newer.environments))
    page = site_pages.render_step(facts, step, older.environments, newer.environments)
    yield step_page(target, step.before, step.after), page


def _fill(overview: SiteOverview, facts: SiteFacts, steps: Sequence[StepResult]) -> None:
    overview.unreadable |= facts.unreadable
    for stack in facts.stacks:
        for probe, history in stack.cells.items():
            row = history.newest
            page = facts.page_of(row.target, row.stack, row.cell)
            values: dict[str, object] = {"stack": row.stack, "target": row.target, "outcome": row.outcome, "page": page}
            values["doubt"] = FILE_LOST.word if row.lost else history.doubt
            overview.cells.append(SiteCell.model_validate(values | {"cell": row.cell, "probe": probe}))
    for step in steps:
        page = step_page(step.target, step.before, step.after)
        said = tuple(map(say_culprit, step.culprits))
        overview.steps.append(
            SiteStep(
                target=step.target,
                before=step.before,
                after=step.after,
                culprits=said,
                page=page,
                lost=tuple(step.lost),
            )
        )


def _environment(row: SiteRow, receipt: Receipt) -> Environment:
    facts: Mapping[str, str] = read_facts(receipt)
    return Environment(row.cell, row.stack, row.target, row.probe, row.run, row.started, facts)
