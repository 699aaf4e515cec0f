"""What a report site shows, in the forms of a terminal, a log of continuous integration, and a step summary."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from megacpp_validate.evidence.receipt import Outcome

from ..github.annotations import write_command
from ..ink import plain, print_indented, print_marked
from ..junit.tree import add, add_properties, make, write
from ..markdown.text import escape
from ..marks import Mark
from ..site_result import SiteCell, SiteResult, SiteStep
from ..summaries import count
from .marks import mark_doubt

_MOST: Final = 20  # cells and files that a terminal and a log list; the site has all
_BREAKS: Final = Mark("✗", "X", "breaks", "bad")
_HOLDS: Final = Mark("✓", "-", "breaks nothing", "good")
_LOST: Final = Mark("○", "?", "not read", "risk")


def render_site(result: SiteResult, console: Console) -> None:
    """Where the site is, and what to look at first."""
    print_indented(console, Text(plain(summarize_site(result)), "bold"), 0)
    for step in result.steps[:_MOST]:
        print_marked(
            console, _BREAKS if step.culprits else _LOST if step.lost else _HOLDS, Text(plain(_say_step(step)))
        )
    for cell in result.not_good[:_MOST]:
        print_marked(console, mark_doubt(cell.outcome, cell.doubt), Text(plain(_say_cell(cell))))
    for file, reason in list(result.unreadable.items())[:_MOST]:
        print_marked(console, _LOST, Text(plain(f"{file}: {reason}")))
    if left := _count_left(result):
        print_indented(console, Text(f"{left} more on the pages"), 4)
    size = f"{count(result.pages, 'file')}, {result.size / 1e6:.1f} MB, in {result.seconds:.1f} s"
    print_indented(console, Text(f"Written: {size}. Open it:"), 0)
    console.print(Text(f"  {plain(str(Path(result.folder) / 'index.html'))}", "cyan"), soft_wrap=True)


def render_site_summary(result: SiteResult) -> str:
    """The same in Markdown, for a step summary."""
    lines = ["## Report", "", f"**{escape(summarize_site(result))}**", ""]
    if result.steps:
        lines += ["| step | target | to blame |", "| --- | --- | --- |"]
        lines += [
            f"| {escape(f'{step.before} → {step.after}')} | {escape(step.target)} | {escape(_say_culprits(step))} |"
            for step in result.steps[:_MOST]
        ]
        lines.append("")
    lines += [
        f"- {mark_doubt(cell.outcome, cell.doubt).symbol} {escape(_say_cell(cell))}" for cell in result.not_good[:_MOST]
    ]
    lines += [f"- not read: {escape(file)}: {escape(why)}" for file, why in list(result.unreadable.items())[:_MOST]]
    if left := _count_left(result):
        lines.append(f"- {left} more on the pages")
    return "\n".join([*lines, ""])


def render_site_annotations(result: SiteResult) -> str:
    """Commands for a log: an error a step that breaks, a warning a cell that is not good and a file that is lost."""
    lines = [
        write_command(
            "error", f"to blame: {'; '.join(step.culprits)}", f"{step.before} -> {step.after} on {step.target}"
        )
        for step in result.steps[:_MOST]
        if step.culprits
    ]
    lines += [write_command("warning", _say_cell(cell), cell.cell) for cell in result.not_good[:_MOST]]
    lines += [write_command("warning", why, f"not read: {file}") for file, why in [*result.unreadable.items()][:_MOST]]
    return "\n".join([*lines, write_command("notice", summarize_site(result), "report")]) + "\n"


def render_site_junit(result: SiteResult) -> str:
    """A suite a stack, a case a cell, and one for the files that could not be read."""
    suites = {}
    for cell in result.cells:
        name = f"{cell.stack} {cell.target}"
        if name not in suites:
            suites[name] = make("testsuite", name=name)
            add_properties(suites[name], {"tool": result.tool, "store": result.store, "made": result.made_at})
        classname = f"report.{cell.stack.replace('.', '_')}.{cell.target}"
        case = add(suites[name], "testcase", name=cell.probe, classname=classname, time="0.000")
        if cell.outcome is Outcome.NOT_RUN:
            add(case, "skipped", message="not run, or its receipt cannot be read")
        elif cell.doubt and cell.outcome.is_good:
            add(case, "error", message=_say_cell(cell))
        elif not cell.outcome.is_good:
            add(case, "failure" if cell.outcome is Outcome.FAIL else "error", message=_say_cell(cell))
    if result.unreadable:
        lost = suites["files"] = make("testsuite", name="files that are no receipts")
        for file, reason in result.unreadable.items():
            add(add(lost, "testcase", name=file, classname="report.files", time="0.000"), "error", message=reason)
    return write(list(suites.values()))


def summarize_site(result: SiteResult) -> str:
    """What was found, in a sentence."""
    breaking = sum(bool(step.culprits) for step in result.steps)
    verb = "breaks" if len(result.steps) == 1 else "break"
    lost = f", {count(len(result.unreadable), 'file')} not read" if result.unreadable else ""
    return (
        f"{count(result.receipts, 'receipt')} in {count(result.runs, 'run')}: {count(len(result.cells), 'cell')}, "
        f"{len(result.not_good)} not good; {breaking} of {count(len(result.steps), 'step')} {verb} something{lost}."
    )


def _say_step(step: SiteStep) -> str:
    return f"{step.before} → {step.after} on {step.target}: {_say_culprits(step)}"


def _say_culprits(step: SiteStep) -> str:
    if step.culprits or not step.lost:
        return "; ".join(step.culprits) or "nobody is to blame"
    more = f" and {count(len(step.lost) - 1, 'other cell')}" if step.lost[1:] else ""
    return f"nobody is to blame, and there is no evidence on {step.lost[0]}{more}"


def _say_cell(cell: SiteCell) -> str:
    return f"{cell.cell}: {mark_doubt(cell.outcome, cell.doubt).word}"


def _count_left(result: SiteResult) -> int:
    return sum(max(len(each) - _MOST, 0) for each in (result.steps, result.not_good, result.unreadable))
