"""The pages of a report: an overview, and a page for each cell; and what the verb says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from ...evidence.receipt import Receipt, TrainingRecord
from ...text import count
from ..describe.receipt import (
    describe_machine,
    describe_receipt,
    describe_rows,
    find_doubles,
    tabulate_checks,
)
from ..describe.session import describe_training, tabulate_training
from ..describe.upgrade import describe_step, mark_step, summarize_step
from ..describe.words import list_fields, list_some, tabulate, tabulate_facts
from ..document import Block, Content, Details, Diagnostic, Document, Heading, Link, Paragraph, Preformatted, Table
from ..marks import Mark, Tone, bad, find_worst_mark, good, mark_exit, missing, risk
from .cells import Cell

if TYPE_CHECKING:
    from .build import SiteResult

_MOST: Final = 20  # cells that a terminal and a log list; the site has all
Run = tuple[Cell, Receipt, TrainingRecord]


def describe_overview(site: SiteResult, modules: Sequence[str], runs: Sequence[Run], made_at: str) -> Document:
    """The answer, every cell as a grid, what is to blame, training runs, and files that are lost.

    Args:
        modules: ids of the bridge modules, in dependency order.
        runs: the training run that each cell is about.
        made_at: time of the report.
    """
    blocks: list[Block] = []
    answers: list[tuple[str, Mark]] = []
    whole, releases = 0, 0
    for target, on_target in groupby(site.cells, lambda cell: cell.target):
        stacks = {
            stack: {cell.probe: cell for cell in cells} for stack, cells in groupby(on_target, lambda cell: cell.stack)
        }
        answers.append(_answer(modules, target, stacks))
        others = sorted({probe for cells in stacks.values() for probe in cells} - set(modules))
        blocks += [Heading(f"Bridge modules on {target}"), _tabulate_grid(stacks, modules)]
        blocks += [Heading(f"Other cells on {target}"), _tabulate_grid(stacks, others)]
        ours = [cells for stack, cells in stacks.items() if stack != "native"]  # the reference is no release
        releases += len(ours)
        whole += sum(all(module in cells and cells[module].holds for module in modules) for cells in ours)
    blocks.append(Heading("What releases broke"))
    for step in site.steps:
        blocks.append(Heading(f"{step.before} → {step.after} on {step.target}", 3, mark_step(step)))
        blocks += [Paragraph(summarize_step(step)), Details("Evidence", tuple(describe_step(step)))]
    newest_first = sorted(runs, key=lambda run: run[1].started, reverse=True)
    named = [(Link(cell.cell, quote(cell.page)), receipt, run) for cell, receipt, run in newest_first]
    blocks += [Heading("Training runs"), tabulate_training(named)]
    lost = tuple((f"`{file}`", why) for file, why in site.unreadable.items())
    blocks += [Heading("Files that could not be read"), Table(("file", "reason"), lost)]
    blocks += [Paragraph(f"Receipts: `{site.store}`; made {made_at}.")]
    marks = [*(mark for _, mark in answers), *([missing()] if lost else [])]
    summary = f"{' '.join(text for text, _ in answers)} {whole} of {count(releases, 'release')} hold in every module."
    title = "Does the bridge to Transformer Engine hold?"
    return Document(title, summary, find_worst_mark(marks, missing()), tuple(blocks))


def _answer(modules: Sequence[str], target: str, stacks: dict[str, dict[str, Cell]]) -> tuple[str, Mark]:
    """What the newest stack with bridge modules shows. A decision of the gate makes no page look better."""
    stack = next((name for name, cells in stacks.items() if cells.keys() & {*modules}), "")
    if not stack:
        return f"No stack on {target} has a receipt of a bridge module.", missing("no receipt")
    cells = stacks[stack]
    marks = {name: cells[name].mark if name in cells else missing("no receipt") for name in modules}
    wrong = [f"{name} ({mark.word})" for name, mark in marks.items() if mark.tone not in (Tone.GOOD, Tone.QUIET)]
    if not wrong:
        return f"{stack} on {target} holds in every bridge module.", good("holds")
    return f"{stack} on {target} does not hold: {', '.join(wrong)}.", find_worst_mark(marks.values(), risk(""))


def _tabulate_grid(stacks: dict[str, dict[str, Cell]], probes: Sequence[str]) -> Table:
    rows: list[tuple[Content, ...]] = []
    for stack, cells in stacks.items():
        if cells.keys() & {*probes}:
            listed = (cells.get(probe) for probe in probes)
            rows.append(
                (stack, *(Link(cell.mark.word, quote(cell.page), cell.mark) if cell else "" for cell in listed))
            )
    return Table(("stack", *probes), tuple(rows))


def describe_cell(cell: Cell, receipt: Receipt | None, unreadable: Mapping[str, str]) -> Document:
    """The page of one cell.

    Args:
        receipt: the one that counts; None where its file cannot be read.
        unreadable: file -> what is wrong with it.
    """
    lost = [row.path for row in cell.rows if row.outcome is None]
    blocks: list[Block] = [Paragraph(f"`{path}` of this cell is an invalid receipt.", missing()) for path in lost]
    if receipt is None:
        blocks.append(Paragraph(f"The newest receipt cannot be shown: {unreadable[cell.path]}", missing()))
    else:
        blocks += _describe_newest(cell, receipt)
    blocks += [Heading("History"), *describe_rows(cell.rows[::-1])]
    return Document(cell.cell, f"{cell.mark.word.capitalize()}.", cell.mark, tuple(blocks))


def _describe_newest(cell: Cell, receipt: Receipt) -> Iterator[Block]:
    jit, late = receipt.jit, sum(receipt.jit.after.values())
    yield Paragraph(
        f"Run `{cell.run}`, {receipt.started or 'date unknown'}; {describe_machine(receipt.machine)}; seed "
        f"{receipt.seed}. Requested: {receipt.requested}: {receipt.requested_because}."
    )
    yield replace(describe_receipt(receipt), mark=cell.mark)
    yield from (Paragraph(double, risk("second copy")) for double in find_doubles((receipt,)))
    yield Paragraph(f"Kernels compiled late: {late}.", bad("late") if late else good("nothing late"))
    yield Details(f"All {count(receipt.checks, 'check')}", (tabulate_checks(receipt.checks),))
    tables = (
        tabulate(receipt.backends, "path requested claimed observed reasons", "Backends"),
        tabulate(receipt.timings, "name median_ms spread clock", "Timed"),
        tabulate(jit.compiled, "when library kernel shape seconds", "Compiled just in time"),
        tabulate(receipt.packages, "name version file other_copies", "Packages as loaded"),
        tabulate(receipt.libraries, "name version files", "Libraries as loaded"),
        tabulate_facts(
            list_fields(jit, "warm_up after hits notes unwatched")
            | list_fields(receipt.machine, "host platform python torch gpu capability driver cuda load")
            | list_fields(receipt, "requested image_digest lock_hash environment commit tool")
        ),
    )
    yield Details("Backends, times, compiles, and everything as loaded", tables)
    yield from describe_training((record.name, receipt, record) for record in receipt.training)


def describe_site(result: SiteResult) -> Document:
    """How many cells are good, and the page to open; formats that list everything have each cell and lost file."""
    cells = [Diagnostic(file, missing("invalid"), "files", why) for file, why in result.unreadable.items()]
    cells += [
        Diagnostic(one.cell, one.mark, f"report.{one.stack.replace('.', '_')}.{one.target}") for one in result.cells
    ]
    wrong = [case.name for case in cells if case.mark.tone not in (Tone.GOOD, Tone.QUIET)]
    breaking = sum(step.breaks for step in result.steps)
    summary = (
        f"{count(result.receipts, 'receipt')} in {count(result.runs, 'run')}: {count(result.cells, 'cell')}; steps "
        f"that break something: {breaking} of {len(result.steps)}; not good: {list_some(wrong, _MOST) or 'none'}."
    )
    pages = Paragraph(f"{count(result.pages, 'page')} in {result.seconds:.1f} s. Open:")
    index = Preformatted(str(Path(result.folder) / "index.html"))
    return Document("Report", summary, mark_exit(result.exit, open_="written"), (pages, index), tuple(cells))
