"""The score of the FP8 cells: faults planted in real copies of Transformer Engine, and which checks saw them."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from ...evidence.receipt import Outcome
from ...evidence.selftest import wilson_interval
from ...evidence.values import Frozen


class Fp8Verdict(StrEnum):
    """What the cells made of a planted fault. Only `CAUGHT` is good."""

    CAUGHT = "caught"  # each of its cells is red, by a check that must see it
    BY_ANOTHER = "by-another"  # seen, but not by that check, or not in all of its cells
    MISSED = "missed"  # each of its cells stays green
    NOT_PLANTED = "not-planted"  # its edit does not fit the copy: the row is stale
    NOT_RUN = "not-run"  # no evidence


class CellSeen(Frozen):
    """One cell on a copy with a fault.

    Attributes:
        cell: its id.
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


class Fp8FaultResult(Frozen):
    """One fault, judged.

    Attributes:
        fault: its id.
        release: of Transformer Engine that it was planted in.
        says: what it is.
        wants: names of the checks that must see it.
        cells: those that must be red.
        green: the one that must stay green.
        reason: of a verdict that is not good, in a sentence.
        seconds: of its cells, added up.
    """

    fault: str
    release: str
    says: str
    verdict: Fp8Verdict
    wants: tuple[str, ...] = ()
    cells: tuple[CellSeen, ...] = ()
    green: CellSeen | None = None
    reason: str = ""
    seconds: float = 0.0

    @property
    def was_judged(self) -> bool:
        """Whether there is evidence on it."""
        return self.verdict not in (Fp8Verdict.NOT_PLANTED, Fp8Verdict.NOT_RUN)

    @property
    def is_alarm(self) -> bool:
        """Whether the cell that must stay green does not."""
        return self.green is not None and self.green.is_red


class Fp8FaultScore(Frozen):
    """The score.

    Attributes:
        held_out: whether no check was written for these faults.
        environment: where it ran, in words; why it did not, where it did not.
        faults: in the order of the matrix, release by release.
        seconds: wall-clock time of all.
    """

    schema_id: Literal["megacpp-validate/fp8-faults/1"] = "megacpp-validate/fp8-faults/1"
    tool: str
    target: str
    environment: str
    held_out: bool
    faults: tuple[Fp8FaultResult, ...] = ()
    seconds: float = Field(default=0.0, ge=0.0)

    @property
    def judged(self) -> tuple[Fp8FaultResult, ...]:
        """Faults that there is evidence on."""
        return tuple(row for row in self.faults if row.was_judged)

    @property
    def caught(self) -> int:
        """Faults that the right check saw."""
        return sum(row.verdict is Fp8Verdict.CAUGHT for row in self.faults)

    @property
    def caught_bound(self) -> float:
        """Lower end of the 95% Wilson interval of the share of judged faults that the right check saw."""
        return wilson_interval(self.caught, len(self.judged))[0]

    @property
    def seen(self) -> int:
        """Faults that any check saw."""
        return sum(row.verdict in (Fp8Verdict.CAUGHT, Fp8Verdict.BY_ANOTHER) for row in self.faults)

    @property
    def seen_bound(self) -> float:
        """Lower end of the 95% Wilson interval of the share of judged faults that any check saw."""
        return wilson_interval(self.seen, len(self.judged))[0]

    @property
    def quiet(self) -> tuple[Fp8FaultResult, ...]:
        """Faults whose cell that must stay green ran."""
        return tuple(row for row in self.faults if row.green is not None and row.green.ran)

    @property
    def alarms(self) -> int:
        """Faults off whose path something turned red."""
        return sum(row.is_alarm for row in self.quiet)

    @property
    def alarm_bound(self) -> float:
        """Upper end of the 95% Wilson interval of the share of cells off the path that turn red."""
        return wilson_interval(self.alarms, len(self.quiet))[1]

    @property
    def breaks(self) -> bool:
        """Whether any fault was not seen by the right check, or was seen where it is not, or a row is stale."""
        good = (Fp8Verdict.CAUGHT, Fp8Verdict.NOT_RUN)
        return self.alarms > 0 or any(row.verdict not in good for row in self.faults)

    @property
    def lacks(self) -> bool:
        """Whether evidence that was asked for is missing."""
        return (
            not self.faults
            or any(row.verdict is Fp8Verdict.NOT_RUN for row in self.faults)
            or any(row.was_judged and (row.green is None or not row.green.ran) for row in self.faults)
        )
