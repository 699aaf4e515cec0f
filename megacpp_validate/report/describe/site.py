"""What a report site shows, in words: where it is, and what to look at first."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.text import count

from ..document import Block, Content, Diagnostic, Document, Mark, Paragraph, Preformatted, Table, Tone, good, missing
from ..document import bad as red
from ..site.result import SiteCell, SiteResult, SiteStep
from .receipt import MARKS

_MOST: Final = 20  # cells that a terminal and a log list; the site has all


def describe_site(result: SiteResult) -> Document:
    """Steps that break, cells that are not good, files that are lost, and the page to open."""
    cells = tuple(_judge_cell(cell) for cell in result.cells)
    steps = tuple(_judge_step(step) for step in result.steps)
    files = tuple(Diagnostic(file, missing("invalid"), "files", why) for file, why in result.unreadable.items())
    wrong = [case for case in (*cells, *files) if case.mark.tone not in (Tone.GOOD, Tone.QUIET)]
    blocks: list[Block] = []
    if result.steps:
        rows: list[tuple[Content, ...]] = [(case.name, case.mark, case.message) for case in steps[:_MOST]]
        blocks.append(Table(("step", "", "blamed"), tuple(rows)))
    if wrong:
        rows = [(case.mark, case.name, case.message) for case in wrong[:_MOST]]
        blocks.append(Table(("", "not good", "why"), tuple(rows)))
    if wrong[_MOST:]:
        blocks.append(Paragraph(f"{len(wrong) - _MOST} more on the pages."))
    size = f"{count(result.pages, 'page')}, {result.size / 1e6:.1f} MB, in {result.seconds:.1f} s"
    blocks += [Paragraph(f"Written: {size}. Open:"), Preformatted(str(Path(result.folder) / "index.html"))]
    return Document("Report", _summarize(result), good("written"), tuple(blocks), (*cells, *steps, *files))


def _summarize(result: SiteResult) -> str:
    breaking = sum(bool(step.culprits) for step in result.steps)
    verb = "breaks" if len(result.steps) == 1 else "break"
    lost = f", {count(len(result.unreadable), 'file')} not read" if result.unreadable else ""
    return (
        f"{count(result.receipts, 'receipt')} in {count(result.runs, 'run')}: {count(result.cells, 'cell')}, "
        f"{len(result.not_good)} not good; {breaking} of {count(result.steps, 'step')} {verb} something{lost}."
    )


def _judge_cell(cell: SiteCell) -> Diagnostic:
    mark = MARKS[cell.outcome]
    if cell.doubt:
        word = f"{mark.word}, {cell.doubt}"  # a doubt is never a pass
        mark = missing(word) if cell.outcome.is_good else Mark(mark.symbol, mark.letter, word, mark.tone)
    message = "" if cell.outcome is not Outcome.NOT_RUN else "The cell did not run, or its receipt cannot be read."
    return Diagnostic(cell.cell, mark, f"report.{cell.stack.replace('.', '_')}.{cell.target}", message)


def _judge_step(step: SiteStep) -> Diagnostic:
    mark = red("breaks") if step.culprits else missing("no evidence") if step.lost else good("breaks nothing")
    message = "; ".join(step.culprits)
    if not step.culprits and step.lost:
        more = f" and {count(len(step.lost) - 1, 'other cell')}" if step.lost[1:] else ""
        message = f"nothing is blamed; no evidence on {step.lost[0]}{more}"
    return Diagnostic(f"{step.before} → {step.after} on {step.target}", mark, "report.steps", message)
