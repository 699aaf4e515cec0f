"""Scores of planted faults, the suite's own score over them, and what features are worth."""

from __future__ import annotations

from typing import Final

from ...canary.dynamic.scores import FaultScore, ScoreRow, Sighting, SuiteScore
from ...gate.ablation import AblationResult, FeatureAblation
from ..document import Block, Bullets, Content, Details, Diagnostic, Document, Paragraph, Table
from ..marks import Tone, good, mark_exit, mark_of, missing
from .words import list_some, show_rate, sum_up, tabulate_facts

_SHOWN: Final = 4  # checks of a cell that are named
_METHOD: Final = (
    "Runs without a feature and with it take turns (off, on, off, on), with the same seed and data. In brackets: the "
    "95% interval, by Student's t over runs of one arm. A change is noise where its interval includes no change."
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


_METRICS: Final = {
    "step_time": "step time", "tokens_per_second": "tokens/s", "memory": "peak memory", "loss": "loss",
}  # fmt: skip


def describe_ablation(result: AblationResult) -> Document:
    """A table of every feature, and below it how each was run."""
    rows: tuple[tuple[Content, ...], ...] = tuple(
        (row.feature, mark_of(row.verdict), *(_show_change(row, name) for name in _METRICS)) for row in result.features
    )
    table = Table(("feature", "verdict", *_METRICS.values()), rows)
    cases = tuple(map(_describe_feature, result.features))
    mark = missing("not judged") if result.lacks else good("judged")
    blocks: tuple[Block, ...] = (table, Paragraph(_METHOD), *cases)
    return Document("What each feature changes", f"{sum_up(cases) or 'No feature was selected'}.", mark, blocks, cases)


def _describe_feature(row: FeatureAblation) -> Diagnostic:
    message, fields = f"{row.title}. Off: {row.plain}", (("not judged", row.reasons),)
    return Diagnostic(row.feature, mark_of(row.verdict), "ablation", message, fields)


def _show_change(row: FeatureAblation, name: str) -> str:
    """A change with its interval: "+3.1% [+2.4%, +3.9%]"."""
    change = next((change for change in row.changes if change.name == name), None)
    if change is None:
        return "not measured"
    ratio, low, high = (f"{100 * (one - 1):+.3g}%" for one in (change.ratio, change.low, change.high))
    return f"{ratio} [{low}, {high}]"
