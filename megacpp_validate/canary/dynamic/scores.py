"""Scores of planted faults: what was planted, who or what had to see it, what did, and how often that is right.

Three suites plant faults: in copies of Transformer Engine for the blame, in its low-precision stack for the FP8 cells,
and between the ranks of the smoke run. A row is one fault; only `Verdict.RIGHT` and `CAUGHT` are good.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field, JsonValue, model_validator

from ...diagnosis.culprits import Culprit
from ...errors import Exit, exit_for
from ...evidence.receipt import Outcome
from ...evidence.selftest import wilson_interval
from ...evidence.values import Cause, Frozen


class Verdict(StrEnum):
    """What became of a planted fault."""

    RIGHT = "right"  # its module and its class are named, and nobody else
    WRONG_MODULE = "wrong-module"  # somebody else is named, and not its module
    WRONG_CAUSE = "wrong-cause"  # its module, and another class
    OTHERS_TOO = "others-too"  # its module, and a second culprit
    CAUGHT = "caught"  # by the check that must see it
    BY_ANOTHER = "by-another"  # by other checks, or not in all of its cells
    MISSED = "missed"  # nobody is named, no check fails
    NOT_PLANTED = "not-planted"  # its edit does not fit the copy: the row is stale
    NOT_RUN = "not-run"  # no evidence

    @property
    def is_evidence(self) -> bool:
        """Whether the fault was judged."""
        return self not in (Verdict.NOT_PLANTED, Verdict.NOT_RUN)


class Planted(Frozen):
    """One fault, judged.

    Attributes:
        fault: its id.
        says: what goes wrong.
        reason: of a verdict that is not good, in a sentence.
        seconds: of its cells or runs, added up.
    """

    fault: str
    says: str
    verdict: Verdict
    reason: str = ""
    seconds: float = 0.0

    @property
    def was_judged(self) -> bool:
        """Whether there is evidence on it."""
        return self.verdict.is_evidence

    @property
    def is_good(self) -> bool:
        """Whether it was seen as it must be."""
        return self.verdict in (Verdict.RIGHT, Verdict.CAUGHT)


class FaultResult(Planted):
    """A fault in a copy of Transformer Engine; `module` and `cause` had to be named, `culprits` were."""

    module: str
    cause: Cause
    release: str
    culprits: tuple[Culprit, ...] = ()


class ControlResult(Frozen):
    """A copy without a fault beside the clean one: the same release twice, with a seed of its own.

    Attributes:
        timed: whether speeds were compared, too.
        culprits: who was named, which is nobody where the blame is right.
        reason: why there is no evidence; empty where there is.
    """

    name: str
    release: str
    seed: int
    timed: bool
    culprits: tuple[Culprit, ...] = ()
    reason: str = ""


class CellSeen(Frozen):
    """One FP8 cell on a copy with a fault.

    Attributes:
        outcome: None where there is no receipt that can be believed.
        right: checks that failed and must.
        others: checks that failed beside them.
        reason: what the receipt says.
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
        """Whether it ran and something is wrong."""
        return self.ran and self.outcome is not None and not self.outcome.is_good


class Fp8FaultResult(Planted):
    """A fault of the low-precision stack.

    Attributes:
        wants: names of the checks that must see it.
        cells: those that must be red.
        green: the one that must stay green.
    """

    release: str
    wants: tuple[str, ...] = ()
    cells: tuple[CellSeen, ...] = ()
    green: CellSeen | None = None

    @property
    def is_alarm(self) -> bool:
        """Whether the cell that must stay green does not."""
        return self.green is not None and self.green.is_red


class SmokeFinding(Frozen):
    """What one check said of one run; `named` has step, ranks, module, tensor and whatever else it names."""

    check: str
    named: dict[str, JsonValue] = Field(default_factory=dict)
    words: str = ""


class SmokeFaultResult(Planted):
    """A fault between ranks.

    Attributes:
        planted: name and step.
        cell, title, ranks: that it is planted in.
        way: which run of the cell has it.
        held_out: whether it was written before what judges it.
        caught_by: the check that must see it.
        wants: what that must name.
        named: whether it does; None where it did not see it.
        elsewhere: whether the cell belongs to other targets than the one that was requested.
    """

    planted: str
    cell: str
    title: str
    ranks: int
    way: str
    held_out: bool
    caught_by: str
    wants: dict[str, JsonValue]
    named: bool | None = None
    findings: tuple[SmokeFinding, ...] = ()
    elsewhere: bool = False

    @property
    def is_good(self) -> bool:
        """Whether the right check saw it and named the place."""
        return self.verdict is Verdict.CAUGHT and self.named is True


class CleanResult(Frozen):
    """One smoke run without a fault: whatever a check says of it is a false alarm."""

    cell: str
    title: str
    way: str
    ending: str
    findings: tuple[SmokeFinding, ...] = ()
    seconds: float = 0.0

    @property
    def is_alarm(self) -> bool:
        """Whether it did not end well, or a check said anything."""
        return self.ending != "done" or bool(self.findings)


class _Score(Frozen):
    """What every score has: `environment` is where it ran, or why it did not; `seconds` is wall-clock time."""

    tool: str
    target: str
    environment: str
    faults: tuple[Planted, ...] = ()
    seconds: float = Field(default=0.0, ge=0.0)

    @property
    def judged(self) -> tuple[Planted, ...]:
        """Faults that there is evidence on."""
        return tuple(row for row in self.faults if row.was_judged)

    @property
    def right(self) -> int:
        """Faults that were seen as they must be."""
        return sum(row.is_good for row in self.faults)

    @property
    def right_bound(self) -> float:
        """Lower end of the 95% Wilson interval of the share of judged faults that are right."""
        return wilson_interval(self.right, len(self.judged))[0]

    @property
    def alarms(self) -> tuple[int, int]:
        """False alarms, and how many cells or runs without a fault there were."""
        raise NotImplementedError

    @property
    def alarm_bound(self) -> float:
        """Upper end of the 95% Wilson interval of the share of false alarms."""
        return wilson_interval(*self.alarms)[1]

    @property
    def breaks(self) -> bool:
        """Whether a fault was not seen as it must be, something else was, or a row is stale."""
        return self.alarms[0] > 0 or any(not row.is_good and row.verdict is not Verdict.NOT_RUN for row in self.faults)

    @property
    def lacks(self) -> bool:
        """Whether evidence that was asked for is missing."""
        return not self.faults or any(row.verdict is Verdict.NOT_RUN for row in self.faults)

    @property
    def exit(self) -> Exit:
        """A breakage before evidence that is missing."""
        return exit_for(breaks=self.breaks, lacks=self.lacks)


class BlameScore(_Score):
    """The score of the blame; `modules` are in dependency order, faults in the order of the matrix."""

    schema_id: Literal["megacpp-validate/blame-score/1"] = "megacpp-validate/blame-score/1"
    modules: tuple[str, ...]
    faults: tuple[FaultResult, ...] = ()
    controls: tuple[ControlResult, ...] = ()

    @property
    def seen_controls(self) -> tuple[ControlResult, ...]:
        """Controls that there is evidence on."""
        return tuple(row for row in self.controls if not row.reason)

    @property
    def alarms(self) -> tuple[int, int]:
        """Controls for which somebody is named, and all that were seen."""
        return sum(bool(row.culprits) for row in self.seen_controls), len(self.seen_controls)

    @property
    def lacks(self) -> bool:
        """Whether a fault or a control has no evidence."""
        rows = any(row.verdict is Verdict.NOT_RUN for row in self.faults) or any(row.reason for row in self.controls)
        return rows or not (self.faults or self.controls)


class Fp8FaultScore(_Score):
    """The score of the FP8 cells; `held_out`: no check was written for these faults."""

    schema_id: Literal["megacpp-validate/fp8-faults/1"] = "megacpp-validate/fp8-faults/1"
    held_out: bool
    faults: tuple[Fp8FaultResult, ...] = ()

    @property
    def seen(self) -> int:
        """Faults that any check saw."""
        return sum(row.verdict in (Verdict.CAUGHT, Verdict.BY_ANOTHER) for row in self.faults)

    @property
    def alarms(self) -> tuple[int, int]:
        """Cells off the path of a fault that turned red, and all that ran."""
        quiet = [row for row in self.faults if row.green is not None and row.green.ran]
        return sum(row.is_alarm for row in quiet), len(quiet)

    @property
    def lacks(self) -> bool:
        """Whether a fault or its green cell did not run."""
        return super().lacks or any(row.was_judged and (row.green is None or not row.green.ran) for row in self.faults)


class SmokeFaultScore(_Score):
    """The score of the smoke run; `clean`: runs without a fault, of every cell that ran."""

    schema_id: Literal["megacpp-validate/smoke-faults/1"] = "megacpp-validate/smoke-faults/1"
    faults: tuple[SmokeFaultResult, ...] = ()
    clean: tuple[CleanResult, ...] = ()

    @property
    def alarms(self) -> tuple[int, int]:
        """Runs without a fault of which a check said something, and all."""
        return sum(run.is_alarm for run in self.clean), len(self.clean)

    @property
    def breaks(self) -> bool:
        """Whether a fault was not seen by its check, or not named, or there was a false alarm.

        Of a fault that was held out it is enough that any check sees it: nobody knew which.
        """
        return self.alarms[0] > 0 or any(
            row.verdict is Verdict.MISSED if row.held_out else not row.is_good for row in self.faults if row.was_judged
        )

    @property
    def lacks(self) -> bool:
        """Whether evidence that this target can give is missing."""
        return not self.judged or any(not row.was_judged and not row.elsewhere for row in self.faults)


class Rate(Frozen):
    """How often something happened.

    Attributes:
        id: short and stable.
        says: of what it is a rate, in a sentence.
        good: which end is the good one.
        low, high: 95% Wilson interval.
        day: ISO 8601; empty where it is unknown.
        day_of: of the run itself, or of the commit that its file came with, which is the latest that it can be.
        source: file of the evidence, relative to the checkout.
    """

    id: str
    says: str
    good: Literal["high", "low"]
    hits: int = Field(ge=0)
    trials: int = Field(ge=0)
    low: float = Field(ge=0, le=1)
    high: float = Field(ge=0, le=1)
    day: str
    day_of: Literal["run", "commit"]
    source: str

    @model_validator(mode="after")
    def _interval_is_of_the_counts(self) -> Rate:
        if (self.low, self.high) != wilson_interval(self.hits, self.trials):
            raise ValueError(f"{self.id}: {self.low} to {self.high} is no interval of {self.hits} of {self.trials}")
        return self


class SuiteScore(Frozen):
    """Every rate, and what gave no evidence."""

    schema_id: Literal["megacpp-validate/score/1"] = "megacpp-validate/score/1"
    rates: tuple[Rate, ...]
    lost: tuple[str, ...] = ()
    exit: Literal[Exit.OPEN] = Field(default=Exit.OPEN, exclude=True)
