"""The suite's own score as people see it: rates with their intervals, their day, and the file they come from."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import TypeAdapter

from ...catalog.bridge import Catalog
from ...errors import EvidenceMissing, WrongArguments
from ...evidence.selftest import SelftestResult, wilson_interval
from ...evidence.strict_json import read_strict_json
from ...process import run_command
from .scores import BlameScore, Rate, SuiteScore

SCORE: Final = "docs/evidence/score.json"
_CLOCK_SKEW: Final = timedelta(minutes=5)  # between two hosts, as `clock_skew_s` of matrix/gate.toml
_GIT_S: Final = 60.0
_T = TypeVar("_T")
_Row = tuple[str, str, Literal["high", "low"], int, int]


def read_score(catalog: Catalog, root: Path, selftest: Path, blame: Path, held_out: Path) -> SuiteScore:
    """The score of three files of evidence, relative to a checkout.

    Raises:
        WrongArguments: one of them holds no score.
        EvidenceMissing: the selftest is not of every mutant of this matrix.
    """
    tested = _read(root / selftest, SelftestResult)
    _require_whole(catalog, root / selftest, tested)
    day = tested.finished_at[:10]
    rates = [_rate(row, day, selftest, root) for row in _rows_of_selftest(tested)]
    lost = list(tested.lost)
    for file, is_held_out in ((blame, False), (held_out, True)):
        score = _read(root / file, BlameScore)
        rates += [_rate(row, "", file, root) for row in _rows_of_blame(score, held_out=is_held_out)]
        lost += [f"{row.fault}: {row.verdict.value}: {row.reason}" for row in score.faults if not row.was_judged]
        lost += [f"{row.name}: {row.reason}" for row in score.controls if row.reason]
    return SuiteScore(rates=tuple(rates), lost=tuple(lost))


def _rows_of_selftest(result: SelftestResult) -> tuple[_Row, ...]:
    """Kill rate, blame accuracy and false-alarm rate of one full run of the selftest."""
    planted = f"faults planted in the wrappers and in what Transformer Engine returns ({len(result.modules)} modules)"
    return (
        ("kill-rate", f"{planted} that turn a probe red", "high", result.killed, len(result.mutants)),
        ("blame-accuracy", "of these, blamed on their own module", "high", result.blamed_rightly, result.killed),
        ("false-alarms", "probe runs without a fault, each with a fresh seed, that are red", "low",
         len(result.false_alarms), result.clean_runs),
    )  # fmt: skip


def _rows_of_blame(result: BlameScore, *, held_out: bool) -> tuple[_Row, ...]:
    """How often the blame is right on faults in copies of a real Transformer Engine, and on copies without one."""
    kind, name = ("held-out faults", "te-blame-held-out") if held_out else ("faults", "te-blame")
    says = f"{kind} in copies of Transformer Engine on {result.target}, named by module and class and nobody else"
    rows: tuple[_Row, ...] = ((name, says, "high", result.right, len(result.judged)),)
    if result.seen_controls:
        says = f"pairs of clean copies on {result.target} of which somebody is blamed"
        rows += (("te-false-blame", says, "low", *result.alarms),)
    return rows


def _rate(row: _Row, day: str, file: Path, root: Path) -> Rate:
    """A rate with its interval; its day is that of the run, else of the commit that the file came with."""
    name, says, good, hits, trials = row
    low, high = wilson_interval(hits, trials)
    return Rate(
        id=name, says=says, good=good, hits=hits, trials=trials, low=low, high=high,
        day=day or _day_of_commit(root, file), day_of="run" if day else "commit", source=file.as_posix(),
    )  # fmt: skip


def _require_whole(catalog: Catalog, file: Path, result: SelftestResult) -> None:
    """Refuse a selftest of some mutants, or of another matrix, or of a day to come."""
    planned = {row.id: row.planned for row in catalog.mutants}
    ran, known = {row.mutant.id for row in result.mutants}, planned.keys()
    # A row that was planted otherwise, or filed under another module, is another fault under an old name.
    changed = sorted({row.mutant.id for row in result.mutants if planned.get(row.mutant.id, row.mutant) != row.mutant})
    if changed or ran != known or len(result.mutants) != len(known) or not result.clean_runs:
        raise EvidenceMissing(
            f"{file} is not of a full selftest of this matrix: {len(ran & known)} of {len(known)} mutants (missing: "
            f"{', '.join(sorted(known - ran)[:5]) or 'none'}; unknown: {', '.join(sorted(ran - known)[:5]) or 'none'}; "
            f"planted otherwise: {', '.join(changed[:5]) or 'none'}), {result.clean_runs} clean runs. Likely cause: "
            "the matrix has changed since, or some were named. Next step: run `nox -s selftest` on all."
        )
    if result.finished_at:
        try:
            ended = datetime.fromisoformat(result.finished_at)
        except ValueError as fault:
            raise _invalid(file, fault) from fault
        if (ended if ended.tzinfo else ended.replace(tzinfo=UTC)) > datetime.now(UTC) + _CLOCK_SKEW:
            raise _invalid(file, f"it ended at {result.finished_at}, which is yet to come")


def _read(file: Path, model: type[_T]) -> _T:
    try:
        text = file.read_text(encoding="utf-8")
        read_strict_json(text)
        found = TypeAdapter(model).validate_json(text)
    except (OSError, ValueError) as fault:
        raise _invalid(file, fault) from fault
    if isinstance(found, SelftestResult) and found.schema_id != SelftestResult.schema_id:
        raise _invalid(file, "it is another result")
    return found


def _invalid(file: Path, fault: Any) -> WrongArguments:
    return WrongArguments(
        f"{file} holds no score: {' '.join(str(fault).split())[:300]}. Likely cause: another file, or one that was cut "
        "short. Next step: write it with `--format json --output FILE` of `nox -s selftest` or `nox -s blame_score`."
    )


def _day_of_commit(root: Path, file: Path) -> str:
    """The day of the commit that a file came with; empty outside of a checkout, and of a changed file."""
    changed = _ask_git(root, "status", "--porcelain", "--ignored", "--", str(file))
    return (_ask_git(root, "log", "-1", "--format=%cs", "--", str(file)) or "") if changed == "" else ""


def _ask_git(root: Path, *words: str) -> str | None:
    try:
        ended = run_command(["git", "--no-optional-locks", *words], limit_s=_GIT_S, folder=root, apart=True)
    except OSError:
        return None
    return ended.words.strip() if ended.code == 0 else None
