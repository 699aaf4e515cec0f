"""Scores of planted faults: what was planted, who or what had to see it, who or what did, and how often.

Four suites plant faults: `selftest` in wrappers and in what a double of Transformer Engine returns, `blame-score` in
copies of Transformer Engine, `fp8-faults` in its low-precision stack, `smoke-faults` between the ranks of the smoke
run. All have one kind of row and one kind of score.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationError

from ...catalog.bridge import Catalog
from ...errors import EvidenceMissing, WrongArguments
from ...evidence.selftest import Mutant, wilson_interval
from ...evidence.values import Frozen, Result, list_errors

EVIDENCE: Final = tuple(
    Path("docs/evidence", name) for name in ("selftest.json", "blame_score.json", "blame_score_held_out.json")
)
Suite = Literal["selftest", "blame-score", "fp8-faults", "smoke-faults"]


class Verdict(StrEnum):
    """What one row of a score shows: the first group for a planted fault, the second for a run without one."""

    RIGHT = "right"  # its module and its class are named, and nobody else
    CAUGHT = "caught"  # by the check that must see it
    WRONG_MODULE = "wrong-module"  # another module is named, and not its own
    WRONG_CAUSE = "wrong-cause"  # its module, and another class
    OTHERS_TOO = "others-too"  # its module, and a second culprit
    MISNAMED = "misnamed"  # the check that must see it names another place
    BY_ANOTHER = "by-another"  # by other checks, or not in all of its cells
    MISSED = "missed"  # nobody is named, no check fails
    NOT_PLANTED = "not-planted"  # its edit does not fit the copy: the row is stale
    ELSEWHERE = "elsewhere"  # its cell belongs to other targets

    QUIET = "quiet"  # nobody is named, no check fails
    FALSE_ALARM = "false-alarm"

    NOT_RUN = "not-run"  # no evidence


_UNJUDGED: Final = (Verdict.NOT_PLANTED, Verdict.ELSEWHERE, Verdict.NOT_RUN)


class Sighting(Frozen):
    """Who or what sees a fault, and what it names.

    Attributes:
        by: a module that is blamed, a cell, or a check of the smoke run.
        names: the class of the cause and its cascades; the checks that fail; or step, ranks, module, tensor.
    """

    by: str
    names: tuple[str, ...] = ()


class ScoreRow(Frozen):
    """One planted fault, or one run without a fault, judged.

    Attributes:
        id: of the fault, or of the run.
        says: what goes wrong.
        where: the release of Transformer Engine, or the run of the smoke model.
        expected, seen: who or what must see it, and who or what did.
        reason: of a verdict that is not good.
        held_out: the fault was written before what judges it: it is enough that any check sees it.
        seconds: of its cells or runs, added up.
    """

    id: str
    says: str = ""
    where: str
    expected: tuple[Sighting, ...] = ()
    seen: tuple[Sighting, ...] = ()
    verdict: Verdict
    reason: str = ""
    held_out: bool = False
    seconds: float = 0.0

    @property
    def plan(self) -> tuple[str, str, str, tuple[Sighting, ...]]:
        """What was known before it ran."""
        return self.id, self.says, self.where, self.expected

    @property
    def was_judged(self) -> bool:
        """Whether there is evidence on it."""
        return self.verdict not in _UNJUDGED

    @property
    def is_good(self) -> bool:
        """Whether a fault was seen, and named, as it must be."""
        return self.verdict in (Verdict.RIGHT, Verdict.CAUGHT)


class FaultScore(Result):
    """The score of one suite.

    Attributes:
        environment: where it ran, or why it did not.
        faults: in the order of the matrix.
        clean: copies, cells, probe runs and runs without a fault.
        seconds: wall-clock time.
        finished_at: ISO 8601 in UTC; empty in what was written before that was kept.
    """

    schema_id: Literal["megacpp-validate/fault-score/2"] = "megacpp-validate/fault-score/2"
    suite: Suite
    target: str
    environment: str
    faults: tuple[ScoreRow, ...] = ()
    clean: tuple[ScoreRow, ...] = ()
    seconds: float = Field(default=0.0, ge=0.0)
    finished_at: str = ""

    @property
    def judged(self) -> tuple[ScoreRow, ...]:
        """Faults that there is evidence on."""
        return tuple(row for row in self.faults if row.was_judged)

    @property
    def caught(self) -> int:
        """Faults that any check sees."""
        return sum(row.verdict is not Verdict.MISSED for row in self.judged)

    @property
    def right(self) -> int:
        """Faults that were seen as they must be."""
        return sum(row.is_good for row in self.faults)

    @property
    def alarms(self) -> tuple[int, int]:
        """False alarms, and the runs without a fault that there is evidence on."""
        return sum(row.verdict is Verdict.FALSE_ALARM for row in self.clean), sum(row.was_judged for row in self.clean)

    @property
    def breaks(self) -> bool:
        """Whether a fault was not seen as it must be, there was a false alarm, or a row is stale."""
        ran = (row for row in self.faults if row.verdict not in (Verdict.NOT_RUN, Verdict.ELSEWHERE))
        wrong = (row.verdict is Verdict.MISSED if row.held_out else not row.is_good for row in ran)
        return self.alarms[0] > 0 or any(wrong)

    @property
    def lacks(self) -> bool:
        """Whether evidence that this target can give is missing."""
        rows = (*self.faults, *self.clean)
        nothing = all(row.verdict in (Verdict.NOT_RUN, Verdict.ELSEWHERE) for row in rows)
        return nothing or any(row.verdict is Verdict.NOT_RUN for row in rows)


# --- the suite's own score ------------------------------------------------------------------------------------------


class Rate(Frozen):
    """How often something happened.

    Attributes:
        id: short and stable.
        says: of what it is a rate, in a sentence.
        low, high: 95% Wilson interval.
        day: of the run, ISO 8601; empty where its file does not say.
        source: file of the evidence, relative to the checkout.
    """

    id: str
    says: str
    hits: int = Field(ge=0)
    trials: int = Field(ge=0)
    low: float = Field(ge=0, le=1)
    high: float = Field(ge=0, le=1)
    day: str = ""
    source: str


class SuiteScore(Result):
    """Every rate, and what gave no evidence."""

    schema_id: Literal["megacpp-validate/score/2"] = "megacpp-validate/score/2"
    rates: tuple[Rate, ...]
    lost: tuple[str, ...] = ()


def plan_mutant(mutant: Mutant) -> ScoreRow:
    """The row of a mutant that has not run."""
    where = f"{mutant.at} ({mutant.where}, path {mutant.requested}): {mutant.fault.value} {mutant.parameters or ''}"
    return ScoreRow(
        id=mutant.id, says=mutant.says, where=where.rstrip(), expected=(Sighting(by=mutant.module),),
        verdict=Verdict.NOT_RUN, reason="there is no run of it",
    )  # fmt: skip


def read_score(catalog: Catalog) -> SuiteScore:
    """The score of the three files of evidence of a checkout.

    Raises:
        WrongArguments: one of them holds no score.
        EvidenceMissing: one cannot be read, or the selftest is not of every mutant of this matrix.
    """
    root, (selftest, blame, held_out) = catalog.folder.parent, EVIDENCE
    scores = {file: _read(root / file) for file in EVIDENCE}
    tested, planned = scores[selftest], [plan_mutant(mutant) for mutant in catalog.mutants]
    if [row.plan for row in tested.faults] != [row.plan for row in planned] or not tested.alarms[1]:
        raise EvidenceMissing(
            f"{root / selftest} is not of a full selftest of this matrix ({len(tested.faults)} mutants of "
            f"{len(planned)}, {tested.alarms[1]} clean runs). Likely cause: the matrix has changed since, or some "
            "were named. Next step: run `nox -s selftest` on all."
        )
    planted = f"faults planted in the wrappers and in what Transformer Engine returns ({len(catalog.modules)} modules)"
    clean = "probe runs without a fault, each with a fresh seed, that are red"
    ran: dict[str, Any] = {"source": selftest.as_posix(), "day": tested.finished_at[:10]}
    rates = [
        _rate("kill-rate", f"{planted} that turn a probe red", tested.caught, len(tested.judged), **ran),
        _rate("blame-accuracy", "of these, blamed on their own module", tested.right, tested.caught, **ran),
        _rate("false-alarms", clean, *tested.alarms, **ran),
    ]
    for file, kind, name in ((blame, "faults", "te-blame"), (held_out, "held-out faults", "te-blame-held-out")):
        score = scores[file]
        ran = {"source": file.as_posix(), "day": score.finished_at[:10]}
        copies = f"copies of Transformer Engine on {score.target}"
        says = f"{kind} in {copies}, named by module and class and nobody else"
        rates.append(_rate(name, says, score.right, len(score.judged), **ran))
        if score.alarms[1]:
            says = f"pairs of clean copies on {score.target} of which somebody is blamed"
            rates.append(_rate("te-false-blame", says, *score.alarms, **ran))
    rows = (row for score in scores.values() for row in (*score.faults, *score.clean))
    lost = tuple(f"{row.id}: {row.verdict.value}: {row.reason}" for row in rows if not row.was_judged)
    return SuiteScore(rates=tuple(rates), lost=lost)


def _rate(name: str, says: str, hits: int, trials: int, **row: Any) -> Rate:
    low, high = wilson_interval(hits, trials)
    return Rate(id=name, says=says, hits=hits, trials=trials, low=low, high=high, **row)


def _read(file: Path) -> FaultScore:
    try:
        return FaultScore.model_validate_json(file.read_bytes())
    except OSError as fault:
        raise EvidenceMissing(
            f"{file} cannot be read: {fault.strerror}. Next step: run the suite that writes it, with --output {file}."
        ) from fault
    except ValidationError as fault:
        raise WrongArguments(
            f"{file} holds no score: {list_errors(fault)}. Likely cause: another version wrote it. Next step: run the "
            "suite again."
        ) from fault
