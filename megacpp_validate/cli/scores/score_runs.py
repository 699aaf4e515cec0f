"""The verb that shows the suite's own score: evidence in, the table that people see out."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import typer

from ...canary.dynamic.blame_score import BlameScore
from ...canary.dynamic.score import Evidence, SuiteScore, score_blame, score_selftest
from ...catalog.bridge import Catalog, matrix_folder
from ...evidence.selftest import SelftestResult
from ...evidence.strict_json import refuse_what_json_hides
from ...evidence.whole_file import write_whole
from ...report.machine import read_json
from ...report.words.score import render_score, tell_score
from ..app import Exit, foreseen, refuse
from ..told_options import PageFormat
from ..whole_telling import tell_whole

SCORE: Final = "docs/evidence/score.json"
SHOWN: Final = "docs/examples/score.md"
_CLOCK_SKEW: Final = timedelta(minutes=5)  # between two hosts, as `clock_skew_s` of matrix/gate.toml
_BLOCK: Final = re.compile(rf"(<!-- from {re.escape(SHOWN)} -->\n).*?(<!-- end -->)", re.DOTALL)


class ScoreInvalid(ValueError):
    """A file that holds no score; the text says why."""


class ScorePartial(ValueError):
    """A selftest that is not of every mutant of this matrix; the text says which."""


@dataclass(frozen=True)
class Asked:
    """The arguments."""

    selftest: Path
    blame: Path
    held_out: Path
    write: bool


@foreseen({ScoreInvalid: Exit.WRONG_ARGUMENTS, ScorePartial: Exit.EVIDENCE_MISSING})
def run_score(catalog: Catalog, matrix: Path | None, asked: Asked, fmt: PageFormat, output: Path | None) -> None:
    """Read, tell and, where asked for, write."""
    root = (matrix or matrix_folder()).absolute().parent
    result = read_score(catalog, root, asked)
    if asked.write:
        _write(root, result)
    tell_whole(
        result,
        fmt,
        output,
        render=lambda console: render_score(result, console=console),
        markdown=lambda: tell_score(result),
    )
    raise typer.Exit(Exit.OPEN)


def read_score(catalog: Catalog, root: Path, asked: Asked) -> SuiteScore:
    """The score of the files.

    Raises:
        ScoreInvalid: one of them holds none.
        ScorePartial: the selftest is not of every mutant.
    """
    selftest = _read_selftest(catalog, root / asked.selftest)
    rates = list(score_selftest(selftest, _evidence(root, asked.selftest)))
    lost = list(selftest.lost)
    for file, held_out in ((asked.blame, False), (asked.held_out, True)):
        blame = _read_blame(root / file)
        rates += score_blame(blame, _evidence(root, file), held_out=held_out)
        lost += [f"{row.fault}: {row.verdict.value}: {row.reason}" for row in blame.faults if not row.was_judged]
        lost += [f"{row.name}: {row.reason}" for row in blame.controls if row.reason]
    return SuiteScore(rates=tuple(rates), lost=tuple(lost))


def _read_selftest(catalog: Catalog, file: Path) -> SelftestResult:
    try:
        text = file.read_text(encoding="utf-8")
        refuse_what_json_hides(text)
        result = read_json(text)
    except (OSError, ValueError) as fault:
        raise _invalid(file, fault, "nox -s selftest -- --format json --output FILE") from fault
    if not isinstance(result, SelftestResult):
        raise _invalid(file, ValueError("it is another result"), "nox -s selftest -- --format json --output FILE")
    if clock := _find_clock_fault(result.finished_at):
        raise _invalid(file, ValueError(clock), "nox -s selftest -- --format json --output FILE")
    planned = {row.id: row.planned for row in catalog.mutants}
    ran, known = {row.mutant.id for row in result.mutants}, planned.keys()
    # A row that was planted otherwise, or filed under another module, is another fault under an old name.
    changed = sorted({row.mutant.id for row in result.mutants if planned.get(row.mutant.id, row.mutant) != row.mutant})
    if changed or ran != known or len(result.mutants) != len(known) or not result.clean_runs:
        missing = ", ".join(sorted(known - ran)[:5]) or "none"
        raise ScorePartial(
            f"{file} is not of a full selftest of this matrix: {len(ran & known)} of {len(known)} mutants (missing: "
            f"{missing}; unknown: {', '.join(sorted(ran - known)[:5]) or 'none'}; planted otherwise: "
            f"{', '.join(changed[:5]) or 'none'}), {result.clean_runs} clean runs. "
            "Likely cause: the matrix has changed since, or some were named. Next step: run `nox -s selftest` on all."
        )
    return result


def _find_clock_fault(finished_at: str) -> str:
    """What is wrong with the time at which a run ended; empty where nothing is, or nobody kept it."""
    if not finished_at:
        return ""
    try:
        ended = datetime.fromisoformat(finished_at)
    except ValueError:
        return f"finished_at is {finished_at[:40]!r}, which is no time"
    ended = ended if ended.tzinfo else ended.replace(tzinfo=UTC)
    return f"it ended at {finished_at}, which is yet to come" if ended > datetime.now(UTC) + _CLOCK_SKEW else ""


def _read_blame(file: Path) -> BlameScore:
    try:
        text = file.read_text(encoding="utf-8")
        refuse_what_json_hides(text)
        return BlameScore.model_validate_json(text)
    except (OSError, ValueError) as fault:
        raise _invalid(file, fault, "nox -s blame_score -- --format json --output FILE") from fault


def _invalid(file: Path, fault: Exception, command: str) -> ScoreInvalid:
    return ScoreInvalid(
        f"{file} holds no score: {' '.join(str(fault).split())[:300]}. Likely cause: another file, or one that was cut "
        f"short. Next step: write it with `{command}`."
    )


def _evidence(root: Path, file: Path) -> Evidence:
    """Where a file lies, and the day of the commit that it came with; no day outside of a checkout.

    Neither has a file that is not as it was committed: its evidence came after that day.
    """
    changed = _ask_git(root, "status", "--porcelain", "--ignored", "--", str(file))
    day = _ask_git(root, "log", "-1", "--format=%cs", "--", str(file)) if changed == "" else None
    return Evidence(source=file.as_posix(), committed=day or "")


def _ask_git(root: Path, *words: str) -> str | None:
    """What git says; None where it cannot."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *words], cwd=root, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _write(root: Path, result: SuiteScore) -> None:
    readme = root / "README.md"
    shown, page = ("\n".join(tell_score(result, folder)) + "\n" for folder in (".", str(Path(SHOWN).parent)))
    try:
        text, found = _BLOCK.subn(lambda block: f"{block[1]}{shown}{block[2]}", readme.read_text(encoding="utf-8"))
        if found != 1:
            refuse(
                f"{readme} has {found} blocks `<!-- from {SHOWN} -->` ... `<!-- end -->`, and one is needed. Next "
                "step: put the two lines where the score is to stand.",
                Exit.WRONG_ARGUMENTS,
            )
        write_whole(root / SCORE, result.model_dump_json(indent=2) + "\n")
        write_whole(root / SHOWN, page)
        write_whole(readme, text)
    except OSError as fault:
        refuse(
            f"the score cannot be written below {root}: {fault.strerror or fault}. Likely cause: it is not yours, or "
            "its disk is full. Next step: make room, or use --output.",
            Exit.INFRASTRUCTURE,
        )
