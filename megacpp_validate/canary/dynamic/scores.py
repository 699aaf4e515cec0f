"""Scores of planted faults: what was planted, which check or blame had to find it, what did, and how often.

Three suites plant faults: `blame-score` in copies of Transformer Engine, `fp8-faults` in its low-precision stack,
`smoke-faults` between the ranks of the smoke run. All three have one kind of row and one kind of score. A field that a
suite does not use is empty.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import Field, JsonValue, TypeAdapter

from ...catalog.bridge import Catalog
from ...diagnosis.culprits import Culprit
from ...errors import EvidenceMissing, Exit, WrongArguments, exit_for
from ...evidence.receipt import Outcome
from ...evidence.selftest import SelftestResult, wilson_interval
from ...evidence.values import Cause, Frozen

SCORE: Final = "docs/evidence/score.json"
_T = TypeVar("_T", SelftestResult, "FaultScore")


class Verdict(StrEnum):
    """How a planted fault ended."""

    RIGHT = "right"  # its module and its class are named, and nobody else
    WRONG_MODULE = "wrong-module"  # another module is named, and not its own
    WRONG_CAUSE = "wrong-cause"  # its module, and another class
    OTHERS_TOO = "others-too"  # its module, and a second culprit
    CAUGHT = "caught"  # by the check that must see it
    BY_ANOTHER = "by-another"  # by other checks, or not in all of its cells
    MISSED = "missed"  # nobody is named, no check fails
    NOT_PLANTED = "not-planted"  # its edit does not fit the copy: the row is stale
    NOT_RUN = "not-run"  # no evidence


class CellSeen(Frozen):
    """One FP8 cell on a copy with a fault.

    Attributes:
        outcome: None where there is no valid receipt.
        right: checks that failed and must.
        others: checks that failed beside them.
        reason: of the receipt.
    """

    cell: str
    outcome: Outcome | None
    right: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    reason: str = ""

    @property
    def ran(self) -> bool:
        """Whether it is evidence."""
        return self.outcome not in (None, Outcome.NOT_RUN, Outcome.BLOCKED)

    @property
    def is_red(self) -> bool:
        """Whether it ran and does not hold."""
        return self.ran and self.outcome is not None and not self.outcome.is_good


class SmokeFinding(Frozen):
    """What one check reports about one run; `named` has step, ranks, module, tensor and whatever else it names."""

    check: str
    named: dict[str, JsonValue] = Field(default_factory=dict)
    words: str = ""


class FaultResult(Frozen):
    """One fault, judged.

    Attributes:
        fault: its id.
        says: what goes wrong.
        reason: of a verdict that is not good.
        seconds: of its cells or runs, added up.
        release: of Transformer Engine, in whose copy it is planted.
        module, cause, culprits: of blame-score: what must be named, and what was.
        wants: names of the checks that must see it, or what its check must name.
        cells, green: of fp8-faults: the cells that must be red, and the one that must stay green.
        planted, cell, title, ranks, way: of smoke-faults: name and step, and the run that has it.
        caught_by, named, findings: of smoke-faults: the check that must see it, whether it names what it must (None
            where it did not see it), and all findings.
        held_out: it was written before what judges it: it is enough that any check sees it.
        elsewhere: its cell belongs to other targets than the one that was requested.
    """

    fault: str
    says: str
    verdict: Verdict
    reason: str = ""
    seconds: float = 0.0
    release: str = ""
    module: str = ""
    cause: Cause | None = None
    culprits: tuple[Culprit, ...] = ()
    wants: tuple[str, ...] | dict[str, JsonValue] = ()
    cells: tuple[CellSeen, ...] = ()
    green: CellSeen | None = None
    planted: str = ""
    cell: str = ""
    title: str = ""
    ranks: int = 0
    way: str = ""
    caught_by: str = ""
    named: bool | None = None
    findings: tuple[SmokeFinding, ...] = ()
    held_out: bool = False
    elsewhere: bool = False

    @property
    def was_judged(self) -> bool:
        """Whether there is evidence on it."""
        return self.verdict not in (Verdict.NOT_PLANTED, Verdict.NOT_RUN)

    @property
    def is_good(self) -> bool:
        """Whether it was seen, and named, as it must be."""
        return self.verdict in (Verdict.RIGHT, Verdict.CAUGHT) and self.named is not False

    @property
    def is_alarm(self) -> bool:
        """Whether the cell that must stay green does not."""
        return self.green is not None and self.green.is_red


class ControlResult(Frozen):
    """A copy without a fault beside the clean one; `culprits` is who was blamed, `reason` why there is no evidence."""

    name: str
    release: str
    seed: int
    timed: bool
    culprits: tuple[Culprit, ...] = ()
    reason: str = ""


class CleanResult(Frozen):
    """One smoke run without a fault: whatever a check finds there is a false alarm."""

    cell: str
    title: str
    way: str
    ending: str
    findings: tuple[SmokeFinding, ...] = ()
    seconds: float = 0.0

    @property
    def is_alarm(self) -> bool:
        """Whether it did not end well, or a check found anything."""
        return self.ending != "done" or bool(self.findings)


class FaultScore(Frozen):
    """The score of one suite.

    Attributes:
        environment: where it ran, or why it did not.
        modules: in dependency order; of blame-score.
        held_out: no check was written for these faults; of fp8-faults.
        faults: in the order of the matrix.
        controls, clean: copies and runs without a fault.
        seconds: wall-clock time.
    """

    schema_id: Literal[
        "megacpp-validate/blame-score/1", "megacpp-validate/fp8-faults/1", "megacpp-validate/smoke-faults/1"
    ]
    tool: str
    target: str
    environment: str
    modules: tuple[str, ...] = ()
    held_out: bool = False
    faults: tuple[FaultResult, ...] = ()
    controls: tuple[ControlResult, ...] = ()
    clean: tuple[CleanResult, ...] = ()
    seconds: float = Field(default=0.0, ge=0.0)

    @property
    def judged(self) -> tuple[FaultResult, ...]:
        """Faults that there is evidence on."""
        return tuple(row for row in self.faults if row.was_judged)

    @property
    def right(self) -> int:
        """Faults that were seen as they must be."""
        return sum(row.is_good for row in self.faults)

    @property
    def seen(self) -> int:
        """Faults that any check saw."""
        return sum(row.verdict in (Verdict.CAUGHT, Verdict.BY_ANOTHER) for row in self.faults)

    @property
    def alarms(self) -> tuple[int, int]:
        """False alarms, and the copies, cells and runs without a fault that there is evidence on."""
        quiet = [bool(row.culprits) for row in self.controls if not row.reason]
        quiet += [row.is_alarm for row in self.faults if row.green is not None and row.green.ran]
        quiet += [run.is_alarm for run in self.clean]
        return sum(quiet), len(quiet)

    @property
    def breaks(self) -> bool:
        """Whether a fault was not seen as it must be, there was a false alarm, or a row is stale."""
        ran = (row for row in self.faults if row.verdict is not Verdict.NOT_RUN)
        wrong = (row.verdict is Verdict.MISSED if row.held_out else not row.is_good for row in ran)
        return self.alarms[0] > 0 or any(wrong)

    @property
    def lacks(self) -> bool:
        """Whether evidence that this target can give is missing."""
        nothing = not self.alarms[1] and all(row.verdict is Verdict.NOT_RUN for row in self.faults)
        lost = any(row.verdict is Verdict.NOT_RUN and not row.elsewhere for row in self.faults)
        no_green = any(row.was_judged and row.cells and not (row.green and row.green.ran) for row in self.faults)
        return nothing or lost or no_green or any(row.reason for row in self.controls)

    @property
    def exit(self) -> Exit:
        """A breakage before evidence that is missing."""
        return exit_for(breaks=self.breaks, lacks=self.lacks)


# --- the suite's own score ------------------------------------------------------------------------------------------


class Rate(Frozen):
    """How often something happened.

    Attributes:
        id: short and stable.
        says: of what it is a rate, in a sentence.
        good: which end is the good one.
        low, high: 95% Wilson interval.
        day: of the run, ISO 8601; empty where its file does not say.
        source: file of the evidence, relative to the checkout.
    """

    id: str
    says: str
    good: Literal["high", "low"] = "high"
    hits: int = Field(ge=0)
    trials: int = Field(ge=0)
    low: float = Field(ge=0, le=1)
    high: float = Field(ge=0, le=1)
    day: str = ""
    source: str


class SuiteScore(Frozen):
    """Every rate, and what gave no evidence."""

    schema_id: Literal["megacpp-validate/score/2"] = "megacpp-validate/score/2"
    rates: tuple[Rate, ...]
    lost: tuple[str, ...] = ()
    exit: Literal[Exit.OPEN] = Field(default=Exit.OPEN, exclude=True)


def read_score(catalog: Catalog, root: Path, selftest: Path, blame: Path, held_out: Path) -> SuiteScore:
    """The score of three files of evidence, relative to a checkout.

    Raises:
        WrongArguments: one of them holds no score.
        EvidenceMissing: the selftest is not of every mutant of this matrix.
    """
    tested = _read(root / selftest, SelftestResult, "megacpp-validate/selftest/1")
    planned = catalog.mutants
    if sorted((row.mutant for row in tested.mutants), key=repr) != sorted(planned, key=repr) or not tested.clean_runs:
        raise EvidenceMissing(
            f"{root / selftest} is not of a full selftest of this matrix ({len(tested.mutants)} mutants of "
            f"{len(planned)}, {tested.clean_runs} clean runs). Likely cause: the matrix has changed since, or some "
            "were named. Next step: run `nox -s selftest` on all."
        )
    planted = f"faults planted in the wrappers and in what Transformer Engine returns ({len(tested.modules)} modules)"
    ran: dict[str, Any] = {"source": selftest.as_posix(), "day": tested.finished_at[:10]}
    alarms = len(tested.false_alarms), tested.clean_runs
    rates = [
        _rate("kill-rate", f"{planted} that turn a probe red", tested.killed, len(tested.mutants), **ran),
        _rate("blame-accuracy", "of these, blamed on their own module", tested.blamed_rightly, tested.killed, **ran),
        _rate("false-alarms", "probe runs without a fault, each with a fresh seed, that are red", *alarms, **ran,
              good="low"),
    ]  # fmt: skip
    lost = list(tested.lost)
    for file, kind, name in ((blame, "faults", "te-blame"), (held_out, "held-out faults", "te-blame-held-out")):
        score, source = _read(root / file, FaultScore, "megacpp-validate/blame-score/1"), file.as_posix()
        copies = f"copies of Transformer Engine on {score.target}"
        says = f"{kind} in {copies}, named by module and class and nobody else"
        rates.append(_rate(name, says, score.right, len(score.judged), source=source))
        if score.alarms[1]:
            says = f"pairs of clean copies on {score.target} of which somebody is blamed"
            rates.append(_rate("te-false-blame", says, *score.alarms, source=source, good="low"))
        lost += [f"{row.fault}: {row.verdict.value}: {row.reason}" for row in score.faults if not row.was_judged]
        lost += [f"{row.name}: {row.reason}" for row in score.controls if row.reason]
    return SuiteScore(rates=tuple(rates), lost=tuple(lost))


def _rate(name: str, says: str, hits: int, trials: int, **row: Any) -> Rate:
    low, high = wilson_interval(hits, trials)
    return Rate(id=name, says=says, hits=hits, trials=trials, low=low, high=high, **row)


def _read(file: Path, model: type[_T], schema: str) -> _T:
    try:
        text = file.read_text(encoding="utf-8")
        found = TypeAdapter(model).validate_json(text)
        if found.schema_id != schema:
            raise ValueError("it is another result")
    except (OSError, ValueError) as fault:
        raise WrongArguments(
            f"{file} holds no score: {' '.join(str(fault).split())[:300]}. Likely cause: another file, or one that was "
            "cut short. Next step: write it with `--format json --output FILE` of `nox -s selftest` or `nox -s "
            "blame_score`."
        ) from fault
    return found
