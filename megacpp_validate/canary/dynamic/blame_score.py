"""The score of the blame: faults planted in real copies of Transformer Engine, and who was named for each."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from ...evidence.selftest import wilson_interval
from ...evidence.values import Cause, Frozen
from .upgrade_result import Culprit


class Verdict(StrEnum):
    """What the blame made of a planted fault. Only `RIGHT` is good."""

    RIGHT = "right"  # its module and its class, and nobody else
    WRONG_MODULE = "wrong-module"  # somebody else is named, and not its module
    WRONG_CAUSE = "wrong-cause"  # its module, and another class
    OTHERS_TOO = "others-too"  # its module, and a second culprit
    MISSED = "missed"  # nobody is named
    NOT_PLANTED = "not-planted"  # its edit does not fit the copy: the row is stale
    NOT_RUN = "not-run"  # no evidence


class FaultResult(Frozen):
    """One fault, judged.

    Attributes:
        fault: its id.
        module, cause: what had to be named.
        release: of Transformer Engine that it was planted in.
        says: what it is.
        culprits: who was named.
        reason: of a verdict that is not right, in a sentence.
        seconds: of its cells, added up.
    """

    fault: str
    module: str
    cause: Cause
    release: str
    says: str
    verdict: Verdict
    culprits: tuple[Culprit, ...] = ()
    reason: str = ""
    seconds: float = 0.0

    @property
    def was_judged(self) -> bool:
        """Whether there is evidence on it."""
        return self.verdict not in (Verdict.NOT_PLANTED, Verdict.NOT_RUN)

    @property
    def names_module(self) -> bool:
        """Whether its module is among the culprits, whoever else is."""
        return self.verdict in (Verdict.RIGHT, Verdict.WRONG_CAUSE, Verdict.OTHERS_TOO)


class ControlResult(Frozen):
    """A copy without a fault beside the clean one: the same release twice, with a seed of its own.

    Attributes:
        name: of the control.
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


class BlameScore(Frozen):
    """The score.

    Attributes:
        modules: ids in dependency order.
        environment: where it ran, in words; why it did not, where it did not.
        faults: in the order of the matrix, release by release.
        seconds: wall-clock time of all.
    """

    schema_id: Literal["megacpp-validate/blame-score/1"] = "megacpp-validate/blame-score/1"
    tool: str
    target: str
    environment: str
    modules: tuple[str, ...]
    faults: tuple[FaultResult, ...] = ()
    controls: tuple[ControlResult, ...] = ()
    seconds: float = Field(default=0.0, ge=0.0)

    @property
    def judged(self) -> tuple[FaultResult, ...]:
        """Faults that there is evidence on."""
        return tuple(row for row in self.faults if row.was_judged)

    @property
    def right(self) -> int:
        """Faults whose module and class are named, and nobody else."""
        return sum(row.verdict is Verdict.RIGHT for row in self.faults)

    @property
    def right_bound(self) -> float:
        """Lower end of the 95% Wilson interval of the share of judged faults that are right."""
        return wilson_interval(self.right, len(self.judged))[0]

    @property
    def seen_controls(self) -> tuple[ControlResult, ...]:
        """Controls that there is evidence on."""
        return tuple(row for row in self.controls if not row.reason)

    @property
    def false_blames(self) -> int:
        """Controls for which somebody is named."""
        return sum(bool(row.culprits) for row in self.seen_controls)

    @property
    def false_blame_bound(self) -> float:
        """Upper end of the 95% Wilson interval of the share of controls that name somebody."""
        return wilson_interval(self.false_blames, len(self.seen_controls))[1]

    @property
    def breaks(self) -> bool:
        """Whether the blame was wrong on anything, or a row is stale."""
        good = (Verdict.RIGHT, Verdict.NOT_RUN)
        return self.false_blames > 0 or any(row.verdict not in good for row in self.faults)

    @property
    def lacks(self) -> bool:
        """Whether evidence that was asked for is missing."""
        nothing = not self.faults and not self.controls
        return (
            nothing
            or any(row.verdict is Verdict.NOT_RUN for row in self.faults)
            or any(row.reason for row in self.controls)
        )
