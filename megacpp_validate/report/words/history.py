"""What is said of cells over runs, the same in a terminal and in Markdown."""

from __future__ import annotations

from collections import Counter
from typing import Final

from megacpp_validate.evidence.history import CellHistory, Direction, FlakeRate, HistoryResult, HistoryRow, Trend

from ..marks import Mark, mark_cell
from ..summaries import count

HEADINGS: Final = ("run", "outcome", "started", "commit", "stack", "total s", "probe s", "step s", "peak MiB", "late")
OVERVIEW: Final = ("cell", "last", "good", "newest", "flakes", "trends")
NUMBERS_FROM: Final = 5  # columns of `HEADINGS` from here on are numbers
_UNREADABLE: Final = Mark("?", "?", "unreadable", "bad")
_ONLY_TIMED: Final = Mark("·", ".", "only timed", "quiet")
_UNKNOWN: Final = Mark("?", "?", "unknown", "quiet")
_DIRECTIONS: Final = {Direction.RISING: "rising", Direction.FALLING: "falling", Direction.STEADY: "steady"}
_COMMIT: Final = 8


def mark_row(row: HistoryRow) -> Mark:
    """How a row of a history looks."""
    if row.outcome is None:
        return _UNREADABLE
    return _ONLY_TIMED if row.only_timed else mark_cell(row.outcome)


def find_last(history: CellHistory) -> HistoryRow | None:
    """The newest row that judged its cell and says when; None where there is none."""
    judged = (row for row in reversed(history.rows) if row.outcome is not None and not row.only_timed)
    return next((row for row in judged if row.dated), None)


def mark_last(history: CellHistory) -> Mark:
    """How a cell looks now; unknown where its receipts only timed it, or do not say when."""
    if (last := find_last(history)) is not None:
        return mark_row(last)
    return _UNREADABLE if all(row.outcome is None for row in history.rows) else _UNKNOWN


def tell_row(row: HistoryRow) -> tuple[str, ...]:
    """A row in the columns of `HEADINGS`, its outcome in words; empty where the receipt says nothing."""
    return (
        row.run,
        mark_row(row).word,
        row.started[:16].replace("T", " "),
        row.commit[:_COMMIT],
        row.environment[:_COMMIT],
        _number(row.seconds_total),
        _number(row.seconds_probe),
        _number(row.step_seconds),
        _number(row.peak_memory_mib or None),
        str(row.compiles_after) if row.compiles_after else "",
    )


def say_notes(row: HistoryRow) -> tuple[str, ...]:
    """What should be known of a row beside its columns: why it is unreadable or bad, or counts for nothing."""
    notes = []
    if row.outcome is None:
        notes.append(f"{row.path} is no receipt: {row.fault}")
    elif not row.outcome.is_good and row.reason:
        notes.append(row.reason)
    if row.only_timed:
        notes.append("it timed its module again and judged nothing: it counts for no rate and no trend")
    elif row.outcome is not None and not row.dated:
        notes.append("it does not say when it started, in a time with a zone: it is in no trend, and never the last")
    if row.same_as:
        notes.append(f"a copy of {row.same_as}, and no evidence of its own")
    if row.contradicts:
        notes.append(
            f"tells the process of {row.contradicts} differently: one of the two was edited, and neither counts"
        )
    return tuple(notes)


def summarize_history(result: HistoryResult) -> str:
    """What the store holds, in a sentence."""
    told = f"{count(result.receipts, 'receipt')} in {count(result.runs, 'run')} of {result.store}"
    lost = f"; {count(result.unreadable, 'file')} unreadable" if result.unreadable else ""
    asked = f"; {count(len(result.cells), 'cell')} by the name of {', '.join(result.asked)}" if result.asked else ""
    return f"{told}{lost}{asked}."


def summarize_cell(history: CellHistory) -> str:
    """The outcomes of a cell in a sentence, the last one apart."""
    outcomes = Counter(mark_row(row).word for row in history.rows)
    told = ", ".join(f"{number} {word}" for word, number in outcomes.items())
    readable = [row for row in history.rows if row.outcome is not None]
    days = sorted({row.started[:10] for row in readable if row.dated})
    when = f" from {days[0]} to {days[-1]}" if len(days) > 1 else f" on {days[0]}" if days else ""
    hosts = len({row.host for row in readable})
    where = f" on {hosts} machines" if hosts > 1 else ""
    last = f" Last: {mark_last(history).word}." if readable else ""
    return f"{count(len(history.rows), 'receipt')}{when}{where}: {told}.{last}"


def tell_overview(history: CellHistory) -> tuple[str, ...]:
    """A cell in the columns of `OVERVIEW`."""
    judged = [row for row in history.rows if not row.only_timed]
    good = sum(row.outcome is not None and row.outcome.is_good for row in judged)
    moving = [
        say_direction(trend) for trend in history.trends if trend.direction in (Direction.RISING, Direction.FALLING)
    ]
    last = find_last(history)
    return (
        history.cell,
        mark_last(history).word,
        f"{good} of {len(judged)}",
        last.started[:10] if last else "",
        say_rate(history.flakes),
        "; ".join(moving),
    )


def say_direction(trend: Trend) -> str:
    """A quantity and where it goes: "step_seconds rising 0.4% a run"."""
    if trend.slope is None:
        return f"{trend.quantity} seen once"
    if trend.direction is Direction.UNKNOWN:
        return f"{trend.quantity} {trend.slope:+.2%} a run"
    return f"{trend.quantity} {_DIRECTIONS[trend.direction]} {trend.slope:+.2%} a run"


def say_trend(trend: Trend) -> str:
    """First, median and last value of a quantity with its spread, its slope and how sure that is."""
    if trend.median is None or trend.first is None or trend.last is None:
        return f"{trend.quantity}: no run that passed measured it."
    unit = f" {trend.unit}" if trend.unit else ""
    if trend.smallest == trend.largest:
        return f"{trend.quantity}: {trend.median:.4g}{unit} in {_say_runs(trend)}."
    values = (
        f"median {trend.median:.4g}{unit}, first {trend.first:.4g}, last {trend.last:.4g}, "
        f"{_number(trend.smallest)} to {_number(trend.largest)} over {_say_runs(trend)}"
    )
    if trend.low is None or trend.high is None:
        return f"{say_direction(trend)}, and too few runs for an interval; {values}."
    return f"{say_direction(trend)} (95%: {trend.low:+.2%} to {trend.high:+.2%}); {values}."


def _say_runs(trend: Trend) -> str:
    number = len(trend.points)
    return "the one run" if number == 1 else f"{number} runs"


def say_rate(rate: FlakeRate) -> str:
    """A flake rate in a cell of a table; empty where it was never tried."""
    return "" if rate.rate is None else f"{rate.flakes} of {rate.runs} ({rate.low:.1%} to {rate.high:.1%})"


def say_flakes(rate: FlakeRate) -> str:
    """A flake rate with its interval, and what it was seen on."""
    apart = f" {count(rate.unbound, 'receipt')} without a stack or a clean commit left out." if rate.unbound else ""
    if rate.rate is None:
        return f"unknown: no stack ran it twice at one commit.{apart}"
    return (
        f"{rate.flakes} of {count(rate.runs, 'run')} ({rate.rate:.1%}; 95% Wilson {rate.low:.1%} to {rate.high:.1%}) "
        f"bad where the same stack and commit was good too: {rate.flaky_states} of "
        f"{count(rate.states, 'state')} that ran more than once.{apart}"
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
