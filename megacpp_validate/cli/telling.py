"""A result, in the form and at the place that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, assert_never

from rich.console import Console

from ..canary.dynamic.bisect_result import BisectResult
from ..canary.dynamic.blame_score import BlameScore
from ..canary.dynamic.fp8_fault_score import Fp8FaultScore
from ..canary.dynamic.smoke_fault_score import SmokeFaultScore
from ..evidence.selftest import SelftestResult
from ..gate.fp8_policy import PolicyResult
from ..report import machine
from ..report.github import annotations as github
from ..report.github import policy as github_policy
from ..report.html import policy as html_policy
from ..report.junit import policy as junit_policy
from ..report.results import Result
from ..report.terminal import bisect as terminal_bisect
from ..report.terminal import blame_score as terminal_blame_score
from ..report.terminal import fp8_faults as terminal_fp8_faults
from ..report.terminal import policy as terminal_policy
from ..report.terminal import selftest as terminal_selftest
from ..report.terminal import smoke_faults as terminal_smoke_faults
from .app import Format
from .output import write_told


def tell(result: Result, fmt: Format, output: Path | None, *, verbose: bool = False) -> None:
    """Print a result, or write it to a file; whoever stops reading it half way changes no exit code."""

    def draw(console: Console) -> None:
        _print_table(result, console, verbose=verbose)

    write_told(draw if fmt is Format.TABLE else None, lambda: _text(result, fmt), output)


def _print_table(result: Result, console: Console, *, verbose: bool) -> None:
    match result:
        case SelftestResult() | BlameScore() | Fp8FaultScore() | SmokeFaultScore():
            _print_score(result, console, verbose=verbose)
        case BisectResult():
            terminal_bisect.render_bisect(result, console=console)
        case PolicyResult():
            terminal_policy.render_policy(result, console=console)
        case _:
            assert_never(result)


_Score = SelftestResult | BlameScore | Fp8FaultScore | SmokeFaultScore


def _print_score(result: _Score, console: Console, *, verbose: bool) -> None:
    match result:
        case SelftestResult():
            terminal_selftest.render_selftest(result, verbose=verbose, console=console)
        case BlameScore():
            terminal_blame_score.render_blame_score(result, verbose=verbose, console=console)
        case Fp8FaultScore():
            terminal_fp8_faults.render_fp8_faults(result, verbose=verbose, console=console)
        case SmokeFaultScore():
            terminal_smoke_faults.render_smoke_faults(result, verbose=verbose, console=console)
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
