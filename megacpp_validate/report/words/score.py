"""The suite's own score in words, as the README and the report show it, and in a terminal."""

from __future__ import annotations

from posixpath import relpath

from rich.console import Console
from rich.text import Text

from ...canary.dynamic.score import Rate, SuiteScore
from ..ink import plain
from ..markdown.text import escape


def say_counts(rate: Rate) -> str:
    """How many of how many."""
    return f"{rate.hits} of {rate.trials}"


def say_share(rate: Rate) -> str:
    """The share; nothing where nothing was tried."""
    return f"{rate.hits / rate.trials:.1%}" if rate.trials else "–"  # noqa: RUF001 - as a table shows that there is none


def say_interval(rate: Rate) -> str:
    """The interval, both ends."""
    return f"{rate.low:.1%} to {rate.high:.1%}"


def say_day(rate: Rate) -> str:
    """When; a day that is not of the run itself says so."""
    if not rate.day:
        return "unknown"
    return rate.day if rate.day_of == "run" else f"{rate.day} or before"


def tell_score(score: SuiteScore, folder: str = ".") -> list[str]:
    """A row a rate, in Markdown; then what they leave out.

    Args:
        score: to be told.
        folder: of the page, relative to the project: links lead from there.
    """
    lines = ["| what | how many | rate | 95% Wilson | run on | evidence |", "| --- | --: | --: | --: | --- | --- |"]
    lines += [
        f"| {escape(rate.says)} | {say_counts(rate)} | {say_share(rate)} | {say_interval(rate)} | {say_day(rate)} "
        f"| [{escape(rate.id)}]({relpath(rate.source, folder)}) |"
        for rate in score.rates
    ]
    return lines + [f"\nLeft out of the figures, for want of evidence: {escape(reason)}" for reason in score.lost]


def render_score(score: SuiteScore, *, console: Console | None = None) -> None:
    """Print a line a rate."""
    console = console or Console()
    for rate in score.rates:
        seen = f"{say_counts(rate):>11}  {say_share(rate):>6}  95% {say_interval(rate)}, {say_day(rate)}"
        console.print(Text(f"{rate.id:18} {seen}", "bold"), soft_wrap=True)
        console.print(Text(f"    {plain(rate.says)}", "dim"), soft_wrap=True)
    for reason in score.lost:
        console.print(Text(f"Left out of the figures, for want of evidence: {plain(reason)}", "yellow"), soft_wrap=True)
