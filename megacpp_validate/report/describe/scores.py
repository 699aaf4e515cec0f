"""Scores of planted faults, the suite's own score over them, and what features are worth."""

from __future__ import annotations

from typing import Final

from ...canary.dynamic.scores import FaultScore, ScoreRow, Sighting, SuiteScore
from ...gate.ablation import ARMS, AblationResult, FeatureAblation
from ..document import Block, Bullets, Content, Details, Diagnostic, Document, Paragraph, Table
from ..marks import Tone, good, mark_exit, mark_of, missing
from .words import list_some, show_rate, sum_up, tabulate_facts

_SHOWN: Final = 4  # checks of a cell that are named
_METHOD: Final = (
    "Blocks of steps without a feature and with it take turns (A B B A) in one process, on the same batches. In "
    "brackets: the interval of the ratio, by Student's t over pairs, corrected for looking after each two of them. The "
    "interval decides: below 0% a win, above 0% a tax, within 5% of 0% no effect larger than 5%."
)


def describe_planted(score: FaultScore) -> Document:
    """The rate with its bound, false alarms, whatever is not as it should be, and every fault."""
    judged = score.judged
    cases = tuple(_diagnose(row, score.suite) for row in (*score.faults, *score.clean))
    facts: dict[str, Content] = {
        "seen by any check": show_rate(score.caught, len(judged)),
        "false alarms in clean runs": show_rate(*score.alarms),
        "not judged": ", ".join(row.id for row in (*score.faults, *score.clean) if not row.was_judged),
        "environment": f"{score.environment}; {score.seconds:.0f} s",
    }
    shown = (case for case in cases if case.mark.tone is not Tone.GOOD)
    blocks: tuple[Block, ...] = (tabulate_facts(facts), *shown, Details("Every fault", cases[: len(score.faults)]))
    summary = f"Planted faults that are caught and named as they must be: {show_rate(score.right, len(judged))}."
    return Document(f"Planted faults: {score.suite}", summary, mark_exit(score.exit), blocks, cases)


def _diagnose(row: ScoreRow, group: str) -> Diagnostic:
    """Where a fault is planted, who or what must see it, and who or what did."""
    expected, seen = (tuple(map(_show_sighting, listed)) for listed in (row.expected, row.seen))
    fields = ("where", row.where), ("expected", expected), ("seen by", seen)
    message = " ".join(filter(None, (row.says, row.reason)))
    return Diagnostic(row.id, mark_of(row.verdict), group, message, fields, seconds=row.seconds)


def _show_sighting(one: Sighting) -> str:
    return ": ".join(filter(None, (one.by, list_some(one.names, _SHOWN))))


def describe_score(score: SuiteScore) -> Document:
    """A row a rate, then what the rates leave out."""
    rows = []
    for rate in score.rates:
        day = rate.day or "unknown"
        rows.append((rate.id, rate.says, show_rate(rate.hits, rate.trials), day, f"`{rate.source}`"))
    lost = tuple(f"Left out of the rates, because no results exist: {reason}" for reason in score.lost)
    table = Table(("rate", "what", "how many", "run on", "evidence"), tuple(rows))
    summary = "How often planted faults are found and named, and how often a clean run is blamed."
    return Document("Scores of the suite", summary, good("scored"), (table, Bullets(lost)))


def describe_ablation(result: AblationResult) -> Document:
    """A table of every feature, and below it how each was run."""
    rows: tuple[tuple[Content, ...], ...] = tuple(
        (row.feature, mark_of(row.verdict), *_show_feature(row)) for row in result.features
    )
    table = Table(
        ("feature", "verdict", "step time", "pairs", "peak memory", "last loss"), rows, numeric=frozenset({3})
    )
    cases = tuple(map(_describe_feature, result.features))
    mark = missing("undecided") if result.lacks else good("decided")
    blocks: tuple[Block, ...] = (table, Paragraph(_METHOD), *cases)
    return Document("What each feature changes", f"{sum_up(cases) or 'No feature was selected'}.", mark, blocks, cases)


def _describe_feature(row: FeatureAblation) -> Diagnostic:
    message, fields = f"{row.title}. Off: {row.plain}", (("not judged", row.reasons),)
    return Diagnostic(row.feature, mark_of(row.verdict), "ablation", message, fields)


def _show_feature(row: FeatureAblation) -> tuple[str, ...]:
    """Step time with its interval, as in "+3.1% [+2.4%, +3.9%]"; pairs of blocks; memory; loss without and with it."""
    time, low, high = (_show_change(one, 1.0) for one in (row.ratio, row.low, row.high))
    step = f"{time} [{low}, {high}]" if row.ratio else ""
    if not row.arms:
        return step, "", "", ""
    off, on = (row.arms[arm] for arm in ARMS)
    memory = _show_change(on.peak_bytes, off.peak_bytes)
    return step, f"{len(row.pairs)} x {row.steps}", memory, f"{off.loss:.3f}, {on.loss:.3f}"


def _show_change(number: float, before: float) -> str:
    return f"{100 * (number / before - 1):+.3g}%" if before else ""
