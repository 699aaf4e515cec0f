"""What the loss gate decided about a folder of curves: in a terminal, as a page, JUnit XML, annotations."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.text import Text

from ..gate.loss_result import LossGateResult, LossOutcome
from .github.annotations import write_command
from .html.pages import render_page
from .ink import draw_mark, draw_sentence, print_indented, print_labelled
from .junit.tree import add, add_properties, make, write
from .words.checks import say_check
from .words.loss import find_failed_losses, mark_loss, name_loss, say_loss, summarize_losses

_LABEL: Final = 9


def render_losses(result: LossGateResult, *, verbose: bool = False, console: Console | None = None) -> None:
    """Print each verdict with what failed; every check where asked for."""
    console = console or Console()
    console.print(Text(f"The loss gate on {result.folder}", "bold"))
    print_indented(console, draw_sentence(summarize_losses(result)), 0)
    for verdict in result.verdicts:
        console.print()
        console.print(draw_mark(mark_loss(verdict), console, name_loss(verdict)))
        print_labelled(console, "why", draw_sentence(say_loss(verdict)), _LABEL)
        for check in verdict.checks if verbose else find_failed_losses(verdict):
            said, style = say_check(check), "" if check.passed else "red"
            print_labelled(console, "holds" if check.passed else "fails", draw_sentence(said, style), _LABEL)


def render_losses_html(result: LossGateResult) -> str:
    """The verdicts with their curves as a page; no sign is a colour alone."""
    tone = "bad" if result.breaks else "good" if result.holds else "risk"
    return render_page("loss.html.j2", result=result, tone=tone)


def render_losses_junit(result: LossGateResult) -> str:
    """One suite, one case a recipe; what cannot be compared is skipped with the reason, and makes no green run."""
    suite = make("testsuite", name="loss gate", time="0.000")
    add_properties(suite, {"tool": result.tool, "folder": result.folder})
    for verdict in result.verdicts:
        case = add(suite, "testcase", name=name_loss(verdict), classname="loss_gate", time="0.000")
        if verdict.outcome is LossOutcome.REFUSED:
            add(case, "skipped", message=say_loss(verdict))
        elif verdict.outcome is LossOutcome.FAIL:
            add(case, "failure", "\n".join(map(say_check, find_failed_losses(verdict))), message=say_loss(verdict))
        add(case, "system-out", "\n".join([say_loss(verdict), *map(say_check, verdict.checks)]))
    add(suite, "system-out", summarize_losses(result))
    return write([suite])


def render_losses_annotations(result: LossGateResult) -> str:
    """An error a recipe that fails, a warning one that cannot be compared; then the answer."""
    levels = {LossOutcome.PASS: "debug", LossOutcome.FAIL: "error", LossOutcome.REFUSED: "warning"}
    lines = [
        write_command(levels[verdict.outcome], say_loss(verdict), f"loss gate: {name_loss(verdict)}")
        for verdict in result.verdicts
    ]
    lines.append(write_command("notice", summarize_losses(result), f"loss gate on {result.folder}"))
    return "".join(f"{line}\n" for line in lines)
