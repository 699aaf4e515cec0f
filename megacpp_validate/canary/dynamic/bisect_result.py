"""What a search for the first bad release saw, and what it concludes."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal

from pydantic import Field

from ...errors import Exit
from ...evidence.values import Frozen

TE: Final = "te"  # the axis that every search has


class Verdict(StrEnum):
    """What one point of the search is. Only the first two say anything about the module."""

    GOOD = "good"
    BAD = "bad"
    CANNOT_BUILD = "cannot-build"  # there is no such environment, or it could not be made
    CANNOT_TELL = "cannot-tell"  # it was made, and something else than the module stands in the way

    @property
    def tells(self) -> bool:
        """Whether it says anything about the module."""
        return self in (Verdict.GOOD, Verdict.BAD)


class Axis(Frozen):
    """One component that changes between the good and the bad end.

    Attributes:
        name: "te", "cudnn", "torch", ...
        values: from the one of the good end to the one of the bad end.
        absent: of them, those that are known to exist and cannot be made usable here; they are never tried.
    """

    name: str
    values: tuple[str, ...] = Field(min_length=1)
    absent: tuple[str, ...] = ()


class Answer(Frozen):
    """What one run at one point gave.

    Attributes:
        reason: what failed, what blocks it, why there is no environment.
        lasting: whether the same point would give it again. A download that failed is tried anew at the next start.
    """

    verdict: Verdict
    reason: str = ""
    lasting: bool = True


class PointResult(Frozen):
    """One point: a value an axis, in the order of the axes.

    Attributes:
        reason: of the last run that gave `verdict`.
        good, bad: how many runs gave each; both above zero is flaky.
        reused: runs that an earlier search had made.
    """

    choices: tuple[str, ...]
    verdict: Verdict
    reason: str = ""
    good: int = 0
    bad: int = 0
    reused: int = 0


class Turn(Frozen):
    """Where along one axis good turns into bad.

    Attributes:
        held: what the other axes were held at.
        last_good: empty where not even the first value could be told.
        first_bad: the first bad value; several where what lies between could not be told: it is one of them.
        untold: of those values, why each could not be told.
        absent, untried: of those values, the ones without an environment here, and those left when patience ended.
    """

    axis: str
    held: dict[str, str] = Field(default_factory=dict)
    last_good: str = ""
    first_bad: tuple[str, ...]
    untold: dict[str, str] = Field(default_factory=dict)
    absent: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()

    @property
    def is_closed(self) -> bool:
        """Whether the first bad value is known."""
        return len(self.first_bad) == 1 and bool(self.last_good)


class AxisCulprit(Frozen):
    """Axes that are bad together, most often one.

    Attributes:
        is_minimal: whether leaving any of them out was seen to be good.
        turns: one an axis.
    """

    axes: tuple[str, ...]
    is_minimal: bool
    turns: tuple[Turn, ...]


class SearchEnd(StrEnum):
    """How a search ended."""

    FOUND = "found"
    NARROWED = "narrowed"  # to a range, or to some of the axes: what would tell more could not be told
    GOOD_IS_BAD = "good-is-bad"
    BAD_IS_GOOD = "bad-is-good"
    END_UNTOLD = "end-untold"  # one of the end points cannot be told
    END_UNBUILT = "end-unbuilt"  # one of the end points cannot be built


_EXITS: Final = {
    SearchEnd.FOUND: Exit.CLOSED, SearchEnd.NARROWED: Exit.EVIDENCE_MISSING,
    SearchEnd.END_UNTOLD: Exit.EVIDENCE_MISSING, SearchEnd.GOOD_IS_BAD: Exit.WRONG_ARGUMENTS,
    SearchEnd.BAD_IS_GOOD: Exit.WRONG_ARGUMENTS,
    SearchEnd.END_UNBUILT: Exit.NO_ENVIRONMENT,
}  # fmt: skip


class BisectResult(Frozen):
    """The answer of a search.

    Attributes:
        module: that is good at one end and bad at the other.
        tier: what judged each point.
        axes: all that were given, the ones that do not change too.
        culprits: sets of axes that are bad; several where each alone is.
        innocent: axes that change and were seen to be good alone, where another axis explains the failure.
        points: every point that was tried, in that order.
        flaky: stated probability that one run is wrong; 0 without.
        confidence: that every verdict is right at that flakiness.
        runs: at all points; the ones of an earlier search too.
    """

    schema_id: Literal["megacpp-validate/bisect/2"] = "megacpp-validate/bisect/2"
    tool: str
    module: str
    tier: str
    axes: tuple[Axis, ...]
    end: SearchEnd
    culprits: tuple[AxisCulprit, ...] = ()
    innocent: tuple[str, ...] = ()
    points: tuple[PointResult, ...] = ()
    flaky: float = 0.0
    confidence: float = 1.0
    environments: int = 0
    runs: int = 0
    seconds: float = 0.0

    @property
    def exit(self) -> Exit:
        """A breakage that was found closes; one that was not pinned down lacks evidence."""
        return _EXITS[self.end]
