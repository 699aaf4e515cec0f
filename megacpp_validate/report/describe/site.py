"""What a report site shows, in words: where it is, and what to look at first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from megacpp_validate.text import count

from ..document import Block, Diagnostic, Document, Paragraph, Preformatted, Table
from ..marks import Tone, bad, good, mark_of, missing
from ..site.result import SiteCell, SiteResult, SiteStep

_MOST: Final = 20  # cells that a terminal and a log list; the site has all


def describe_site(result: SiteResult) -> Document:
    """Steps, cells that are not good, files that are lost, and the page to open."""
    cells = tuple(map(_judge_cell, result.cells))
    steps = tuple(map(_judge_step, result.steps))
    files = tuple(Diagnostic(file, missing("invalid"), "files", why) for file, why in result.unreadable.items())
    wrong = [case for case in (*cells, *files) if case.mark.tone not in (Tone.GOOD, Tone.QUIET)]
    more = f"{len(wrong) - _MOST} more on the pages." if wrong[_MOST:] else ""
    blocks: tuple[Block, ...] = (
        Table(("step", "", "blamed"), tuple((case.name, case.mark, case.message) for case in steps[:_MOST])),
        Table(("", "not good", "why"), tuple((case.mark, case.name, case.message) for case in wrong[:_MOST])),
        Paragraph(more),
        Paragraph(f"{count(result.pages, 'page')}, {result.size / 1e6:.1f} MB, in {result.seconds:.1f} s. Open:"),
        Preformatted(str(Path(result.folder) / "index.html")),
    )
    breaking = sum(bool(step.culprits) for step in result.steps)
    summary = (
        f"{count(result.receipts, 'receipt')} in {count(result.runs, 'run')}: {count(result.cells, 'cell')}, "
        f"{len(result.not_good)} not good; steps that break something: {breaking} of {len(result.steps)}; "
        f"files not read: {len(result.unreadable)}."
    )
    return Document("Report", summary, good("written"), blocks, (*cells, *steps, *files))


def _judge_cell(cell: SiteCell) -> Diagnostic:
    mark = mark_of(cell.outcome)
    word = ", ".join(filter(None, (mark.word, cell.doubt)))  # a doubt is never a pass
    doubted = missing(word) if cell.outcome.is_good else replace(mark, word=word)
    return Diagnostic(
        cell.cell, doubted if cell.doubt else mark, f"report.{cell.stack.replace('.', '_')}.{cell.target}"
    )


def _judge_step(step: SiteStep) -> Diagnostic:
    name = f"{step.before} → {step.after} on {step.target}"
    if step.culprits:
        return Diagnostic(name, bad("breaks"), "report.steps", "; ".join(step.culprits))
    if step.lost:
        return Diagnostic(name, missing("no evidence"), "report.steps", f"no evidence on {', '.join(step.lost)}")
    return Diagnostic(name, good("breaks nothing"), "report.steps")
