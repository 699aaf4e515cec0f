"""A result, in the form and at the place that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, assert_never

from rich.console import Console

from ..environments.session_result import ParityResult, SmokeSession, SupportGrid
from ..gate.fp8_session import Fp8Result
from ..gate.loss_result import LossGateResult
from ..gate.policy_result import PolicyResult
from ..report import loss_report, machine
from ..report.github import annotations as github
from ..report.github import policy as github_policy
from ..report.html import pages as html
from ..report.html import policy as html_policy
from ..report.junit import parity as junit_parity
from ..report.junit import policy as junit_policy
from ..report.results import Result
from ..report.terminal import parity as terminal_parity
from ..report.terminal import policy as terminal_policy
from .app import Format
from .output import write_told


def tell(result: Result, fmt: Format, output: Path | None, *, verbose: bool = False) -> None:
    """Print a result, or write it to a file; whoever stops reading it half way changes no exit code."""

    def draw(console: Console) -> None:
        _print_table(result, console, verbose=verbose)

    write_told(draw if fmt is Format.TABLE else None, lambda: _text(result, fmt), output)


def _print_table(result: Result, console: Console, *, verbose: bool) -> None:
    match result:
        case ParityResult() | Fp8Result() | SmokeSession():
            terminal_parity.render_session(result, verbose=verbose, console=console)
        case SupportGrid():
            terminal_parity.render_support(result, console=console)
        case LossGateResult():
            loss_report.render_losses(result, verbose=verbose, console=console)
        case PolicyResult():
            terminal_policy.render_policy(result, console=console)
        case _:
            assert_never(result)


def _text(result: Result, fmt: Format) -> str:
    if fmt is Format.JSON:
        return machine.to_json(result)
    if fmt is Format.MARKDOWN:
        return github.render_step_summary(result)
    return _RENDERERS[fmt, type(result)](result)  # a verb offers no other form: `told_options`


_RENDERERS: Final[dict[tuple[Format, type[Result]], Callable[[Any], str]]] = {
    (Format.HTML, ParityResult): html.render_session_html,
    (Format.HTML, Fp8Result): html.render_session_html,
    (Format.HTML, SmokeSession): html.render_session_html,
    (Format.HTML, LossGateResult): loss_report.render_losses_html,
    (Format.JUNIT, ParityResult): junit_parity.render_session_junit,
    (Format.JUNIT, Fp8Result): junit_parity.render_session_junit,
    (Format.JUNIT, SmokeSession): junit_parity.render_session_junit,
    (Format.JUNIT, LossGateResult): loss_report.render_losses_junit,
    (Format.GITHUB, ParityResult): github.render_session_annotations,
    (Format.GITHUB, Fp8Result): github.render_session_annotations,
    (Format.GITHUB, SmokeSession): github.render_session_annotations,
    (Format.GITHUB, LossGateResult): loss_report.render_losses_annotations,
    (Format.HTML, PolicyResult): html_policy.render_policy_html,
    (Format.JUNIT, PolicyResult): junit_policy.render_policy_junit,
    (Format.GITHUB, PolicyResult): github_policy.render_policy_annotations,
}
