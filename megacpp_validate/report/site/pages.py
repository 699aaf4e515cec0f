"""The pages of a report: overview, blame, training, and a page a cell; and what the verb says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...canary.dynamic.step import StepResult
from ...evidence.receipt import Receipt, TrainingRecord
from ...gate.release import GateDecision
from ...text import count
from ..describe.gate import describe_gate
from ..describe.receipt import (
    describe_machine,
    describe_receipt,
    describe_rows,
    find_doubles,
    find_fallbacks,
    list_facts,
    tabulate_checks,
)
from ..describe.session import describe_training
from ..describe.upgrade import describe_step, mark_step, name_culprit, summarize_step
from ..describe.words import list_fields, tabulate, tabulate_facts
from ..document import Block, Content, Details, Diagnostic, Document, Heading, Link, Paragraph, Preformatted, Table
from ..marks import Mark, Tone, bad, find_worst_mark, good, mark_of, missing, quiet, risk
from ..render.html import make_anchor
from .cells import Cell, Grid

if TYPE_CHECKING:
    from .build import SiteResult

_MOST: Final = 20  # cells that a terminal and a log list; the site has all


@dataclass
class Site:
    """What the pages show.

    Attributes:
        modules: ids of the bridge modules, in dependency order.
        gates: decisions of the release gate.
        unreadable: file of an invalid receipt -> reason.
        runs: the training run that each cell is about.
    """

    store: str
    made_at: str
    modules: tuple[str, ...]
    grid: Grid
    gates: tuple[GateDecision, ...] = ()
    unreadable: dict[str, str] = field(default_factory=dict)
    steps: list[StepResult] = field(default_factory=list)
    runs: list[tuple[Receipt, TrainingRecord]] = field(default_factory=list)

    @property
    def cells(self) -> list[Cell]:
        """Every cell."""
        return [cell for cells in self.grid.values() for cell in cells.values()]


def describe_pages(site: Site) -> dict[str, Document]:
    """Path -> page; a page without content is left out."""
    documents = {"index.html": _describe_overview(site), "steps.html": _describe_steps(site)}
    return {path: page for path, page in {**documents, "training.html": _describe_runs(site)}.items() if page.blocks}


def _describe_overview(site: Site) -> Document:
    """The answer, every cell as a grid, what is to blame, decisions of the gate, and files that are lost."""
    blocks: list[Block] = []
    answers: list[tuple[str, Mark]] = []
    for target in dict.fromkeys(target for target, _ in site.grid):
        stacks = {stack: cells for (of, stack), cells in site.grid.items() if of == target}
        answers.append(_answer(site, target, stacks))
        others = sorted({probe for cells in stacks.values() for probe in cells} - set(site.modules))
        blocks += [Heading(f"Bridge modules on {target}"), _tabulate_grid(stacks, site.modules)]
        blocks += [Heading(f"Other cells on {target}"), _tabulate_grid(stacks, others)]
    rows = tuple(
        (
            Link(_name_step(step), f"steps.html#{make_anchor(_name_step(step))}"), mark_step(step),
            "; ".join(map(name_culprit, step.culprits)) or "nothing", ", ".join(step.lost),
        )
        for step in site.steps
    )  # fmt: skip
    blocks += [Heading("What releases broke"), Table(("step", "", "blamed", "no evidence on"), rows)]
    gates = [describe_gate(decision) for decision in site.gates]
    for gate in gates:
        blocks += [Heading(gate.title, mark=gate.mark), Paragraph(gate.summary), Details("The decision", gate.blocks)]
    lost = tuple((f"`{file}`", why) for file, why in site.unreadable.items())
    blocks += [Heading("Files that could not be read"), Table(("file", "reason"), lost)]
    blocks += [Paragraph(f"Receipts: `{site.store}`; made {site.made_at}.")]
    marks = [*(mark for _, mark in answers), *(gate.mark for gate in gates), *([missing()] if lost else [])]
    releases = [cells for (_, stack), cells in site.grid.items() if stack != "native"]  # the reference is no release
    whole = sum(all(module in cells and cells[module].holds for module in site.modules) for cells in releases)
    summary = f"{' '.join(text for text, _ in answers)} {whole} of {count(releases, 'release')} hold in every module."
    title = "Does the bridge to Transformer Engine hold?"
    return Document(title, summary, find_worst_mark(marks, missing()), tuple(blocks))


def _answer(site: Site, target: str, stacks: dict[str, dict[str, Cell]]) -> tuple[str, Mark]:
    """What the newest stack with bridge modules shows. A decision of the gate makes no page look better."""
    stack = next((name for name, cells in stacks.items() if cells.keys() & {*site.modules}), "")
    if not stack:
        return f"No stack on {target} has a receipt of a bridge module.", missing("no receipt")
    marks = {name: _mark(stacks[stack], name) for name in site.modules}
    wrong = [f"{name} ({mark.word})" for name, mark in marks.items() if mark.tone not in (Tone.GOOD, Tone.QUIET)]
    if not wrong:
        return f"{stack} on {target} holds in every bridge module.", good("holds")
    return f"{stack} on {target} does not hold: {', '.join(wrong)}.", find_worst_mark(marks.values(), risk(""))


def _mark(cells: dict[str, Cell], probe: str) -> Mark:
    return cells[probe].mark if probe in cells else missing("no receipt")


def _tabulate_grid(stacks: dict[str, dict[str, Cell]], probes: Sequence[str]) -> Table:
    rows: list[tuple[Content, ...]] = []
    for stack, cells in stacks.items():
        if cells.keys() & {*probes}:
            links = (
                Link(cells[probe].mark.word, cells[probe].page, cells[probe].mark) if probe in cells else ""
                for probe in probes
            )
            rows.append((stack, *links))
    return Table(("stack", *probes), tuple(rows))


def _name_step(step: StepResult) -> str:
    return f"{step.before} → {step.after} on {step.target}"


def _describe_steps(site: Site) -> Document:
    """Every step between adjacent releases."""
    blocks: list[Block] = []
    for step in site.steps:
        blocks += [Heading(_name_step(step), mark=mark_step(step)), Paragraph(summarize_step(step))]
        blocks += describe_step(step)
    summary = f"Steps that break something: {sum(step.breaks for step in site.steps)} of {len(site.steps)}."
    mark = find_worst_mark(map(mark_step, site.steps), quiet("no step"))
    return Document("What releases broke", summary, mark, tuple(blocks))


def _describe_runs(site: Site) -> Document:
    """Loss curves and speed of the runs that cells are about, the newest first."""
    cells = {cell.name: cell for cell in site.cells}
    runs = sorted(site.runs, key=lambda run: run[0].started, reverse=True)
    blocks = describe_training((Link(one.cell, cells[one.cell].page), one, record) for one, record in runs)
    marks = [cells[one.cell].mark for one, _ in runs]
    marks += [block.mark for block in blocks if isinstance(block, Paragraph) and block.mark]
    doubted = sum(not cells[one.cell].holds for one, _ in runs)
    summary = f"{count(runs, 'training run')}: {doubted} in a cell that does not hold."
    return Document("Loss and speed of training runs", summary, find_worst_mark(marks, quiet("no run")), blocks)


def describe_cell(cell: Cell, receipt: Receipt | None) -> Document:
    """The page of one cell.

    Args:
        receipt: the one that counts; None where its file cannot be read.
    """
    lost = [row.path for row in cell.rows if row.outcome is None]
    blocks: list[Block] = [Paragraph(f"`{path}` of this cell is an invalid receipt.", missing()) for path in lost]
    if receipt is None:
        blocks.append(Paragraph(f"The newest receipt cannot be shown: {cell.fault}", missing()))
    else:
        blocks += _describe_newest(cell, receipt)
    blocks += [Heading("History"), *describe_rows(cell.rows[::-1])]
    return Document(cell.name, f"{cell.mark.word.capitalize()}.", cell.mark, tuple(blocks))


def _describe_newest(cell: Cell, receipt: Receipt) -> Iterator[Block]:
    jit, fell_back = receipt.jit, find_fallbacks(receipt)
    yield Paragraph(
        f"Run `{cell.row.run}`, {receipt.started or 'date unknown'}; {describe_machine(receipt.machine)}; seed "
        f"{receipt.seed}. Requested: {receipt.requested}: {receipt.requested_because}."
    )
    yield replace(describe_receipt(receipt), mark=cell.mark)
    yield Details(f"All {count(receipt.checks, 'check')}", (tabulate_checks(receipt.checks),))
    yield tabulate(fell_back, "path requested claimed observed reasons", "Fell back")
    yield Details("Backends", (tabulate(receipt.backends, "path requested claimed observed reasons"),))
    yield from (Paragraph(double, risk("second copy")) for double in find_doubles((receipt,)))
    yield Details("As loaded", (tabulate_facts(dict(list_facts(receipt))),))
    late = sum(jit.after.values())
    yield Paragraph(f"Kernels compiled late: {late}.", bad("late") if late else good("nothing late"))
    facts = tabulate_facts(list_fields(jit, "warm_up after hits notes unwatched"))
    yield Details("Compiled just in time", (facts, tabulate(jit.compiled, "when library kernel shape seconds")))
    yield Details("Timed", (tabulate(receipt.timings, "name median_ms spread clock"),))
    yield from describe_training((record.name, receipt, record) for record in receipt.training)


def describe_site(result: SiteResult) -> Document:
    """Steps, cells that are not good, files that are lost, and the page to open."""
    cells = []
    for cell in result.cells:
        mark = mark_of(cell.outcome)
        word = ", ".join(filter(None, (mark.word, cell.doubt)))
        mark = missing(word) if cell.doubt and cell.outcome.is_good else replace(mark, word=word)
        cells.append(Diagnostic(cell.cell, mark, f"report.{cell.stack.replace('.', '_')}.{cell.target}"))
    cells += [Diagnostic(file, missing("invalid"), "files", why) for file, why in result.unreadable.items()]
    wrong = [case for case in cells if case.mark.tone not in (Tone.GOOD, Tone.QUIET)]
    blocks: tuple[Block, ...] = (
        tabulate(result.steps[:_MOST], "target before after culprits lost"),
        Table(("", "not good", "why"), tuple((case.mark, case.name, case.message) for case in wrong[:_MOST])),
        Paragraph(f"{count(result.pages, 'page')} in {result.seconds:.1f} s. Open:"),
        Preformatted(str(Path(result.folder) / "index.html")),
    )
    breaking = sum(bool(step.culprits) for step in result.steps)
    summary = (
        f"{count(result.receipts, 'receipt')} in {count(result.runs, 'run')}: {count(result.cells, 'cell')}, not good: "
        f"{len(wrong)}; steps that break something: {breaking} of {len(result.steps)}."
    )
    return Document("Report", summary, good("written"), blocks, tuple(cells))
