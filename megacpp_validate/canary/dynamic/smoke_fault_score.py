"""The score of the smoke run: faults planted in real runs, which check saw each, and whether it named the place."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from pydantic import Field, JsonValue

from ...evidence.selftest import wilson_interval
from ...evidence.values import Frozen

FOUND = "found.json"  # beside the receipt of a cell: `CellFound`


class SmokeFaultVerdict(StrEnum):
    """What the checks made of a planted fault. Only `CAUGHT`, named rightly, is good."""

    CAUGHT = "caught"  # by the check that must see it
    BY_ANOTHER = "by-another"  # by other checks alone
    MISSED = "missed"  # nothing was said
    NOT_RUN = "not-run"  # no evidence


class SmokeFinding(Frozen):
    """What one check said of one run.

    Attributes:
        check: its name.
        named: step, ranks, module, tensor and whatever else it names.
        words: for people.
    """

    check: str
    named: dict[str, JsonValue] = Field(default_factory=dict)
    words: str = ""


class RunFound(Frozen):
    """One run of a cell, without a fault or with one.

    Attributes:
        run: id of the fault; of a run without one the way that it took.
        fault: as it was planted; empty for none.
        ending: as the launcher said it.
        findings: of all checks.
        seconds: wall time, of all processes that it took.
    """

    run: str
    fault: str
    ending: str
    findings: tuple[SmokeFinding, ...] = ()
    seconds: float = Field(default=0.0, ge=0.0)


class CellFound(Frozen):
    """What a cell leaves beside its receipt."""

    schema_id: Literal["megacpp-validate/smoke-found/1"] = "megacpp-validate/smoke-found/1"
    cell: str
    clean: tuple[RunFound, ...]
    faulty: tuple[RunFound, ...]


class SmokeFaultResult(Frozen):
    """One fault, judged.

    Attributes:
        fault: its id.
        planted: name and step.
        says: what goes wrong.
        cell, title, ranks: that it is planted in.
        way: which run of the cell has it.
        held_out: whether it was written before what judges it.
        caught_by: the check that must see it.
        wants: what that must name.
        named: whether it does; None where it did not see it.
        findings: of all checks.
        reason: of a verdict that is not good, in a sentence.
        elsewhere: whether the cell is of other targets than the one that was asked for.
        seconds: of its runs.
    """

    fault: str
    planted: str
    says: str
    cell: str
    title: str
    ranks: int
    way: str
    held_out: bool
    caught_by: str
    wants: dict[str, JsonValue]
    verdict: SmokeFaultVerdict
    named: bool | None = None
    findings: tuple[SmokeFinding, ...] = ()
    reason: str = ""
    elsewhere: bool = False
    seconds: float = 0.0

    @property
    def was_judged(self) -> bool:
        """Whether there is evidence on it."""
        return self.verdict is not SmokeFaultVerdict.NOT_RUN

    @property
    def is_good(self) -> bool:
        """Whether the right check saw it and named the place."""
        return self.verdict is SmokeFaultVerdict.CAUGHT and self.named is True


class CleanResult(Frozen):
    """One run without a fault: whatever a check says of it is a false alarm."""

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


class SmokeFaultScore(Frozen):
    """The score.

    Attributes:
        target: what it ran on.
        environment: interpreter and torch, in words; why it did not run, where it did not.
        faults: in the order of the matrix.
        clean: runs without a fault, of every cell that ran.
        seconds: wall-clock time of all.
    """

    schema_id: Literal["megacpp-validate/smoke-faults/1"] = "megacpp-validate/smoke-faults/1"
    tool: str
    target: str
    environment: str
    faults: tuple[SmokeFaultResult, ...] = ()
    clean: tuple[CleanResult, ...] = ()
    seconds: float = Field(default=0.0, ge=0.0)

    @property
    def judged(self) -> tuple[SmokeFaultResult, ...]:
        """Faults that there is evidence on."""
        return tuple(row for row in self.faults if row.was_judged)

    @property
    def caught(self) -> int:
        """Faults that the right check saw."""
        return sum(row.verdict is SmokeFaultVerdict.CAUGHT for row in self.faults)

    @property
    def named(self) -> int:
        """Faults that the right check saw and named."""
        return sum(row.is_good for row in self.faults)

    @property
    def named_bound(self) -> float:
        """Lower end of the 95% Wilson interval of their share of the judged faults."""
        return wilson_interval(self.named, len(self.judged))[0]

    @property
    def alarms(self) -> tuple[CleanResult, ...]:
        """Runs without a fault of which a check said something."""
        return tuple(run for run in self.clean if run.is_alarm)

    @property
    def breaks(self) -> bool:
        """Whether a fault was not seen by its check, or not named, or there was a false alarm.

        Of a fault that was held out it is enough that any check sees it: nobody knew which.
        """
        return bool(self.alarms) or any(
            row.verdict is SmokeFaultVerdict.MISSED if row.held_out else not row.is_good for row in self.judged
        )

    @property
    def lacks(self) -> bool:
        """Whether evidence that this target can give is missing."""
        return not self.judged or any(not row.was_judged and not row.elsewhere for row in self.faults)


def judge_finding(
    caught_by: str, wants: Mapping[str, JsonValue], findings: tuple[SmokeFinding, ...]
) -> tuple[SmokeFaultVerdict, bool | None, str]:
    """What findings on a run with a fault are worth: verdict, whether the place is named, and why it is not good.

    Args:
        caught_by: the check that must have said something.
        wants: what it must have named; other words of its are free.
        findings: of all checks.
    """
    right = [finding for finding in findings if finding.check == caught_by]
    if not right:
        others = ", ".join(dict.fromkeys(finding.check for finding in findings))
        if others:
            return SmokeFaultVerdict.BY_ANOTHER, None, f"{caught_by} says nothing; {others} does"
        return SmokeFaultVerdict.MISSED, None, "no check says anything"
    wrong = [name_differences(wants, finding) for finding in right]
    if all(wrong):
        return SmokeFaultVerdict.CAUGHT, False, "; ".join(wrong[0])
    return SmokeFaultVerdict.CAUGHT, True, ""


def name_differences(wants: Mapping[str, JsonValue], finding: SmokeFinding) -> list[str]:
    """Every word that a finding names otherwise than it must, or not at all."""
    return [
        f"{key} is {finding.named.get(key)!r} and must be {value!r}"
        for key, value in wants.items()
        if key not in finding.named or finding.named[key] != value
    ]
