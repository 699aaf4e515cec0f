"""Scores of planted faults in words: blame, FP8 cells, smoke run, selftest, and the suite's own score over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from posixpath import relpath
from typing import Any, Final

from megacpp_validate.evidence.selftest import Fate, SelftestResult, wilson_interval

from ...canary.dynamic.scores import (
    BlameScore,
    CellSeen,
    FaultResult,
    Fp8FaultResult,
    Fp8FaultScore,
    Planted,
    Rate,
    SmokeFaultResult,
    SmokeFaultScore,
    SmokeFinding,
    SuiteScore,
    Verdict,
)  # fmt: skip
from ...diagnosis.culprits import Culprit
from ...errors import Exit
from ..document import (
    Block,
    Bullets,
    Details,
    Diagnostic,
    Document,
    Inline,
    Link,
    Mark,
    Paragraph,
    Table,
    bad,
    good,
    missing,
)

_SHOWN: Final = 3  # checks of a cell that are named
_FIRST: Final = ("step", "ranks", "module", "tensor")  # of what a check names
_WORDS: Final = {
    Verdict.RIGHT: "right", Verdict.WRONG_MODULE: "another module is named", Verdict.WRONG_CAUSE: "wrong class",
    Verdict.OTHERS_TOO: "others are named too", Verdict.CAUGHT: "caught", Verdict.BY_ANOTHER: "seen by another check",
    Verdict.MISSED: "missed", Verdict.NOT_PLANTED: "not planted", Verdict.NOT_RUN: "not run",
}  # fmt: skip
_MARKS: Final = {Exit.OPEN: good("open"), Exit.CLOSED: bad("closed")}
_COLUMNS: Final = ("fault", "where", "what goes wrong", "must be seen by", "verdict", "seen by")


def describe_planted(score: BlameScore | Fp8FaultScore | SmokeFaultScore) -> Document:
    """The rate with its bound, false alarms, whatever is not as it should be, and every fault."""
    judged, (alarms, quiet) = len(score.judged), score.alarms
    alarm = f"{alarms} of {quiet} are false alarms (95% Wilson upper bound {score.alarm_bound:.1%})"
    lines = [f"{_quiet(score)}: {alarm if quiet else 'none ran'}."]
    if isinstance(score, Fp8FaultScore) and judged:
        bound = wilson_interval(score.seen, judged)[0]
        lines.append(f"Any check sees {score.seen} of {judged} faults (95% Wilson lower bound {bound:.1%}).")
    if left := [row.fault for row in score.faults if not row.was_judged]:
        lines.append(f"Not judged: {len(left)} of {len(score.faults)} faults ({', '.join(left)}).")
    summary = (
        f"{score.right} of {judged} planted faults are {_aim(score)} ({score.right / judged:.1%}; 95% Wilson lower "
        f"bound {score.right_bound:.1%})."
        if judged
        else f"No fault was judged: {score.environment.rstrip('.')}."
    )
    unsettled = [row for row in score.faults if not row.is_good or (isinstance(row, Fp8FaultResult) and row.is_alarm)]
    blocks: list[Block] = [Bullets(tuple(lines))]
    if isinstance(score, BlameScore):
        blocks.append(_by_module(score))
    blocks += [_diagnose(row, score.schema_id) for row in unsettled]
    if loud := list(_loud(score)):
        blocks.append(Bullets(tuple(loud)))
    blocks.append(Details("Every fault", (Table(_COLUMNS, tuple(map(_row, score.faults))),)))
    blocks.append(Paragraph(f"{score.environment}; {score.seconds:.0f} s."))
    cases = tuple(_diagnose(row, score.schema_id) for row in score.faults)
    mark = _MARKS.get(score.exit) or missing("evidence missing")
    return Document(f"Planted faults: {score.schema_id.split('/')[1]}", summary, mark, tuple(blocks), cases)


def describe_selftest(result: SelftestResult) -> Document:
    """Rates, the table by module, and whatever is not as it should be."""
    alarms, runs = len(result.false_alarms), result.clean_runs
    summary = (
        f"{result.killed} of {len(result.mutants)} mutants are killed ({result.kill_rate:.1%}); "
        f"{result.blamed_rightly} of {result.killed} are blamed on their own module ({result.blame_accuracy:.1%}); "
        f"{alarms} false alarms in {runs} clean probe runs ({result.false_alarm_rate:.2%}; 95% Wilson upper bound "
        f"{result.false_alarm_bound:.2%})."
    )
    rows = []
    for module in result.modules:
        mine = [row for row in result.mutants if row.mutant.module == module]
        killed = [row for row in mine if row.fate is Fate.KILLED]
        rightly = sum(row.blamed_rightly for row in killed)
        rows.append((module, str(len(mine)), str(len(killed)), str(rightly)))
    wrong = [
        f"{row.mutant.id} ({row.mutant.module}): {row.fate.value}, blamed on {', '.join(row.blamed) or 'nobody'}"
        f"{f' by {row.check}' if row.check else ''}{f'; {row.reason}' if row.reason else ''}: {row.mutant.says}"
        for row in result.unsettled
    ]
    wrong += [f"false alarm: {alarm.cell}, seed {alarm.seed}: {alarm.check}" for alarm in result.false_alarms]
    wrong += [f"lost: {reason}" for reason in result.lost]
    every = tuple(
        (row.mutant.id, row.mutant.module, row.fate.value, ", ".join(row.blamed), row.check) for row in result.mutants
    )
    blocks: tuple[Block, ...] = (
        Table(("bridge module", "mutants", "killed", "blamed rightly"), tuple(rows), numeric=frozenset({1, 2, 3})),
        *((Bullets(tuple(wrong)),) if wrong else ()),
        Details("Every mutant", (Table(("mutant", "module", "fate", "blamed", "check"), every),)),
        Paragraph(f"{result.seconds:.0f} s."),
    )
    cases = tuple(
        Diagnostic(
            row.mutant.id,
            good("killed") if row.blamed_rightly else bad(row.fate.value),
            row.mutant.module,
            row.reason or row.check,
            seconds=row.seconds,
        )
        for row in result.mutants
    )
    mark = _MARKS.get(result.exit) or missing("evidence missing")
    return Document("Selftest", summary, mark, blocks, cases)


def describe_score(score: SuiteScore, folder: str = ".") -> Document:
    """A row a rate, then what the rates leave out.

    Args:
        folder: of the page, relative to the project: links lead from there.
    """
    rows = tuple(
        (
            rate.says, f"{rate.hits} of {rate.trials}", f"{rate.hits / rate.trials:.1%}" if rate.trials else "",
            f"{rate.low:.1%} to {rate.high:.1%}", _say_day(rate), Link(rate.id, relpath(rate.source, folder)),
        )
        for rate in score.rates
    )  # fmt: skip
    table = Table(("what", "how many", "rate", "95% Wilson", "run on", "evidence"), rows, numeric=frozenset({1, 2, 3}))
    lost = tuple(f"Left out of the rates, because no results exist: {reason}" for reason in score.lost)
    summary = "How often planted faults are found and named, and how often a clean run is blamed."
    return Document("Scores of the suite", summary, good("scored"), (table, *((Bullets(lost),) if lost else ())))


def _say_day(rate: Rate) -> str:
    return f"{rate.day}{'' if rate.day_of == 'run' else ' or before'}" if rate.day else "unknown"


def _aim(score: BlameScore | Fp8FaultScore | SmokeFaultScore) -> str:
    if isinstance(score, BlameScore):
        return "named by module and class, and nobody else is"
    return (
        "caught by a check that must see them"
        if isinstance(score, Fp8FaultScore)
        else "caught and named by their check"
    )


def _quiet(score: BlameScore | Fp8FaultScore | SmokeFaultScore) -> str:
    if isinstance(score, BlameScore):
        return "Pairs of clean copies"
    return "Cells off the path of a fault" if isinstance(score, Fp8FaultScore) else "Runs without a fault"


def _loud(score: BlameScore | Fp8FaultScore | SmokeFaultScore) -> Iterable[str]:
    """Whatever has no fault and was not as it should be."""
    if isinstance(score, BlameScore):
        for row in score.controls:
            if row.culprits or row.reason:
                yield f"{row.name}: {_say_culprits(row.culprits) or f'not run: {row.reason}'}"
    elif isinstance(score, SmokeFaultScore):
        for run in score.clean:
            if run.is_alarm:
                yield f"{run.title}, {run.way}: {'; '.join(map(_say_finding, run.findings)) or run.ending}"


def _by_module(score: BlameScore) -> Table:
    rows = []
    for module in (*score.modules, "all"):
        mine = [row for row in score.faults if row.was_judged and module in (row.module, "all")]
        right = sum(row.is_good for row in mine)
        named = sum(row.verdict in (Verdict.RIGHT, Verdict.WRONG_CAUSE, Verdict.OTHERS_TOO) for row in mine)
        bound = f">= {wilson_interval(right, len(mine))[0]:.0%}" if mine else ""
        rows.append((module, str(len(mine)), str(named), str(right), bound))
    columns = ("module", "faults", "right module", "right module and class, alone", "95% Wilson")
    return Table(columns, tuple(rows), numeric=frozenset({1, 2, 3, 4}))


def _mark(row: Planted) -> Mark:
    word = _WORDS[row.verdict]
    if isinstance(row, SmokeFaultResult) and row.verdict is Verdict.CAUGHT:
        word = f"{word}, named {'rightly' if row.named else 'wrongly'}"
    return good(word) if row.is_good else bad(word) if row.was_judged else missing(word)


def _diagnose(row: Planted, schema: str) -> Diagnostic:
    where, expected, seen = _read_row(row)
    fields = (("where", where), ("must be seen by", expected), ("seen by", seen))
    message = " ".join(filter(None, (row.says, row.reason)))
    shown = tuple((name, value) for name, value in fields if value)
    return Diagnostic(row.fault, _mark(row), schema.split("/")[1], message, shown, seconds=row.seconds)


def _row(row: Planted) -> tuple[Inline, ...]:
    where, expected, seen = _read_row(row)
    return (row.fault, where, row.says, expected, _mark(row), seen if row.is_good else row.reason or seen)


def _read_row(row: Planted) -> tuple[str, str, str]:
    """Where a fault is planted, who or what must see it, and who or what did."""
    match row:
        case FaultResult():
            return row.release, f"{row.module} ({row.cause.value})", _say_culprits(row.culprits)
        case Fp8FaultResult():
            cells = [*row.cells, *([row.green] if row.is_alarm and row.green else [])]
            return row.release, ", ".join(row.wants), "; ".join(map(_say_cell, cells))
        case SmokeFaultResult():
            expected = f"{row.caught_by}: {_say_named(row.wants)}"
            return f"{row.title}; {row.way}", expected, "; ".join(map(_say_finding, row.findings))
    return "", "", ""


def _say_culprits(culprits: Sequence[Culprit]) -> str:
    said = []
    for one in culprits:
        cascades = f", and with it {', '.join(one.cascades)}" if one.cascades else ""
        said.append(f"{one.module} ({one.cause.value}){cascades}")
    return "; ".join(said)


def _say_cell(cell: CellSeen) -> str:
    failed = [*cell.right, *cell.others]
    more = f" and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
    outcome = cell.outcome.value if cell.outcome else "no receipt"
    return f"{cell.cell}: {', '.join(failed[:_SHOWN]) or outcome}{more}"


def _say_finding(finding: SmokeFinding) -> str:
    return f"{finding.check}: {_say_named(finding.named) or finding.words}"


def _say_named(named: Mapping[str, Any]) -> str:
    """Step 2, ranks 1, module layers.3: in one order, whatever wrote them."""
    order = sorted(named, key=lambda key: (_FIRST.index(key) if key in _FIRST else len(_FIRST), key))
    values = {key: named[key] for key in order if named[key] not in ("", [])}
    return ", ".join(
        f"{key} {', '.join(map(str, value)) if isinstance(value, list) else value}" for key, value in values.items()
    )
