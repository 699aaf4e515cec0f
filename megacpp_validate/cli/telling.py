"""A result, in the form and at the place that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, assert_never

from rich.console import Console

from ..report.github import annotations as github
from ..report.github import policy as github_policy
from ..report.html import policy as html_policy
from ..report.junit import policy as junit_policy
from ..report.results import Result
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
    (Format.HTML, PolicyResult): html_policy.render_policy_html,
    (Format.JUNIT, PolicyResult): junit_policy.render_policy_junit,
    (Format.GITHUB, PolicyResult): github_policy.render_policy_annotations,
}
