"""Scores of planted faults, the suite's own score over them, and what features are worth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from ...canary.dynamic.scores import CellSeen, FaultResult, FaultScore, SmokeFinding, SuiteScore
from ...diagnosis.culprits import Culprit
from ...evidence.selftest import SelftestResult
from ...gate.ablation import AblationResult, Change, FeatureAblation, LossChange
from ..document import Block, Bullets, Content, Details, Diagnostic, Document, Paragraph, Table
from ..marks import Mark, bad, good, mark_exit, mark_of, missing
from .words import list_some, show_rate, sum_up, tabulate_facts

_SHOWN: Final = 3  # checks of a cell that are named
_FIRST: Final = ("step", "ranks", "module", "tensor")  # of what a check names
_METHOD: Final = (
    "Runs without a feature and with it take turns (off, on, off, on), with the same seed and data. In brackets: the "
    "95% interval, by Student's t over runs of one arm. A change is noise where its interval includes no change."
)


def describe_planted(score: FaultScore) -> Document:
    """The rate with its bound, false alarms, whatever is not as it should be, and every fault."""
    name, judged = score.schema_id.split("/")[1], len(score.judged)
    cases = tuple(_diagnose(row, name) for row in score.faults)
    facts: dict[str, Content] = {
        "false alarms in clean runs": show_rate(*score.alarms),
        "not judged": ", ".join(row.fault for row in score.faults if not row.was_judged),
        "environment": f"{score.environment}; {score.seconds:.0f} s",
    }
    if name == "fp8-faults":
        facts["seen by any check"] = show_rate(score.seen, judged)
    facts |= {row.name: _list_culprits(row.culprits) or row.reason for row in score.controls}
    alarms = (run for run in score.clean if run.is_alarm)
    facts |= {f"{one.title}, {one.way}": _list_findings(one.findings) or one.ending for one in alarms}
    shown = (case for row, case in zip(score.faults, cases, strict=True) if not row.is_good or row.is_alarm)
    blocks: tuple[Block, ...] = (tabulate_facts(facts), *shown, Details("Every fault", cases))
    summary = f"Planted faults that are caught and named as they must be: {show_rate(score.right, judged)}."
    return Document(f"Planted faults: {name}", summary, mark_exit(score.exit), blocks, cases)


def _mark(row: FaultResult) -> Mark:
    word = row.verdict.value.replace("-", " ")
    if row.named is not None:
        word = f"{word}, named {'rightly' if row.named else 'wrongly'}"
    return good(word) if row.is_good else bad(word) if row.was_judged else missing(word)


def _diagnose(row: FaultResult, group: str) -> Diagnostic:
    """Where a fault is planted, who or what must see it, and who or what did."""
    cells = [*row.cells, *([row.green] if row.is_alarm and row.green else [])]
    if row.module:
        expected = f"{row.module} ({row.cause.value if row.cause else ''})"
    elif isinstance(row.wants, dict):
        expected = f"{row.caught_by}: {_show_named(row.wants)}"
    else:
        expected = ", ".join(row.wants)
    seen = *_list_culprits(row.culprits), *_list_findings(row.findings), *map(_show_cell, cells)
    fields = ("where", row.release or f"{row.title}; {row.way}"), ("expected", expected), ("seen by", seen)
    message = " ".join(filter(None, (row.says, row.reason)))
    return Diagnostic(row.fault, _mark(row), group, message, fields, seconds=row.seconds)


def _list_culprits(culprits: Iterable[Culprit]) -> tuple[str, ...]:
    return tuple(
        "; with it: ".join(filter(None, (f"{one.module} ({one.cause.value})", ", ".join(one.cascades))))
        for one in culprits
    )


def _show_cell(cell: CellSeen) -> str:
    outcome = cell.outcome.value if cell.outcome else "no receipt"
    return f"{cell.cell}: {list_some([*cell.right, *cell.others], _SHOWN) or outcome}"


def _list_findings(findings: Iterable[SmokeFinding]) -> tuple[str, ...]:
    return tuple(f"{one.check}: {_show_named(one.named) or one.words}" for one in findings)


def _show_named(named: Mapping[str, Any]) -> str:
    """Step 2, ranks 1, module layers.3: in one order, whatever wrote them."""
    order = sorted(named, key=lambda key: (_FIRST.index(key) if key in _FIRST else len(_FIRST), key))
    values = {key: named[key] for key in order if named[key] not in ("", [])}
    return ", ".join(
        f"{key} {', '.join(map(str, value)) if isinstance(value, list) else value}" for key, value in values.items()
    )


def describe_selftest(result: SelftestResult) -> Document:
    """Rates, the table by module, and whatever is not as it should be."""
    cases = {
        row.mutant.id: Diagnostic(
            row.mutant.id,
            good("killed") if row.blamed_rightly else bad(row.fate.value),
            row.mutant.module,
            " ".join(filter(None, (row.mutant.says, row.reason))),
            (("blamed", ", ".join(row.blamed) or "nobody"), ("check", row.check)),
            seconds=row.seconds,
        )
        for row in result.mutants
    }
    summary = (
        f"Mutants killed: {show_rate(result.killed, len(result.mutants))}; of these blamed on their own module: "
        f"{show_rate(result.blamed_rightly, result.killed)}; false alarms in clean probe runs: "
        f"{show_rate(len(result.false_alarms), result.clean_runs)}."
    )
    wrong = [f"false alarm: {alarm.cell}, seed {alarm.seed}: {alarm.check}" for alarm in result.false_alarms]
    wrong += [f"lost: {reason}" for reason in result.lost]
    blocks: tuple[Block, ...] = (
        *(cases[row.mutant.id] for row in result.unsettled),
        Bullets(tuple(wrong)),
        Details("Every mutant", tuple(cases.values())),
        Paragraph(f"{result.seconds:.0f} s."),
    )
    return Document("Selftest", summary, mark_exit(result.exit), blocks, tuple(cases.values()))


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
        (row.feature, mark_of(row.verdict), *map(_show_change, (row.step_time, row.tokens_per_second, row.memory)),
         _show_loss(row.loss))
        for row in result.features
    )  # fmt: skip
    table = Table(("feature", "verdict", "step time", "tokens/s", "peak memory", "loss"), rows)
    cases = tuple(map(_describe_feature, result.features))
    mark = good("judged") if result.holds else missing("not judged")
    blocks: tuple[Block, ...] = (table, Paragraph(_METHOD), *cases)
    return Document("What each feature changes", f"{sum_up(cases) or 'No feature was selected'}.", mark, blocks, cases)


def _describe_feature(row: FeatureAblation) -> Diagnostic:
    off, on = _flatten(row.off), _flatten(row.on)
    changed = tuple(f"{key}: {off.get(key)} -> {value}" for key, value in on.items() if off.get(key) != value)
    fields = (("off -> on", changed), ("not judged", row.reasons))
    return Diagnostic(row.feature, mark_of(row.verdict), "ablation", f"{row.title}. Off: {row.plain}", fields)


def _flatten(arm: dict[str, Any]) -> dict[str, Any]:
    """Settings of an arm; what stands in a table by TABLE.NAME."""
    flat: dict[str, Any] = {}
    for key, value in arm.items():
        flat |= {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _show_change(change: Change | None) -> str:
    """A change with its interval: "+3.1% [+2.4%, +3.9%]"."""
    if change is None:
        return "not measured"
    ratio, low, high = (f"{100 * (one - 1):+.3g}%" for one in (change.ratio, change.low, change.high))
    return f"{ratio} [{low}, {high}]"


def _show_loss(loss: LossChange | None) -> str:
    if loss is None:
        return "not measured"
    if loss.identical:
        return "bitwise equal"
    return f"{loss.difference:+.2g} nats, {'beyond' if loss.changes else 'within'} {max(loss.half, loss.rounding):.2g}"
