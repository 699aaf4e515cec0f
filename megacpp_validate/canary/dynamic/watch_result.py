"""What the watch for releases knows, and what one run of it found."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Literal

from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, Field, ValidationError

from ...evidence.strict_json import refuse_what_json_hides
from ...evidence.values import Frozen

# A version goes into arguments, file names and titles: what is no version as packaging prints it is refused.
LONGEST_VERSION: Final = 64  # characters


def _as_printed(name: str) -> str:
    try:
        printed = str(Version(name))
    except InvalidVersion as fault:
        raise ValueError(str(fault)) from fault
    if printed != name:
        raise ValueError(f"{name!r} is printed as {printed}")
    return name


VersionName = Annotated[
    str, Field(pattern=r"^[0-9][0-9a-z.!+]*$", max_length=LONGEST_VERSION), AfterValidator(_as_printed)
]


class Standing(StrEnum):
    """What became of a release. Only `JUDGED` says anything of it."""

    KNOWN = "known"  # it was there when the watch began, and is not newer than the pinned one
    JUDGED = "judged"
    WAITING = "waiting"  # there is no pure-Python wheel of it yet, or its judgement was given up: tried again
    LEFT_OUT = "left-out"  # by rule: a pre-release, or withdrawn before it was judged


class Untold(StrEnum):
    """What of a release no run has told yet, for none came to its end since."""

    NOTHING = ""
    LOOK = "look"  # that the index says something else of it than before
    VERDICT = "verdict"


class Listed(Frozen):
    """A release as the index has it.

    Attributes:
        wheel_sha256: of its pure-Python wheel; empty where the index does not say.
        has_wheel: whether there is one.
        yanked: the reason why all of its files are withdrawn; None where they are not.
    """

    version: VersionName
    has_wheel: bool
    wheel_sha256: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    yanked: str | None = None


class WatchedRelease(Frozen):
    """A release as the watch knows it.

    Attributes:
        first_seen, judged_at: ISO 8601 in UTC.
        against: the release that it was judged against.
        code: the verdict of the tiers that need no GPU, as an exit code; None before there is one.
        gpu_code: that of the dynamic tier.
        reason: why it is not judged; empty where it is.
        withdrawn: what the index has done to it since; empty where it stands as it was.
        untold: what the next run has to tell of it; a file of an earlier version has none of it, and all was told.
    """

    version: VersionName
    standing: Standing
    first_seen: str
    judged_at: str = ""
    against: str = ""
    code: int | None = None
    gpu_code: int | None = None
    reason: str = ""
    withdrawn: str = ""
    wheel_sha256: str = ""
    untold: Untold = Untold.NOTHING

    @property
    def told(self) -> WatchedRelease:
        """The same, with nothing left to tell."""
        return self.model_copy(update={"untold": Untold.NOTHING})

    @property
    def verdict(self) -> int | None:
        """The last one: a run that takes in what a GPU saw tells nothing else anew."""
        return self.code if self.gpu_code is None else self.gpu_code


class WatchState(Frozen):
    """Everything that the watch knows, oldest release first."""

    schema_id: Literal["megacpp-validate/te-watch-state/1"] = "megacpp-validate/te-watch-state/1"
    distribution: str
    releases: tuple[WatchedRelease, ...] = ()

    @property
    def told(self) -> WatchState:
        """The same, with nothing left to tell."""
        return self.model_copy(update={"releases": tuple(row.told for row in self.releases)})


class GpuStep(Frozen):
    """A step that waits for a machine with a GPU."""

    old: VersionName
    new: VersionName
    target: str = Field(pattern=r"^[a-z][a-z0-9_]*$")


class WatchResult(Frozen):
    """One run.

    Attributes:
        index: its address, without who asks; empty where none was asked.
        pinned: the release that is in production.
        changed: releases of which this run learnt something, or one before it that did not come to tell it.
        judged: those of them whose verdict is told for the first time; that of the others was told before.
        left: answers of the gpu tier that gave no verdict, each with why.
        issues: files of issue texts that it wrote.
        gpu: what a machine with a GPU is still to judge.
    """

    schema_id: Literal["megacpp-validate/te-watch/1"] = "megacpp-validate/te-watch/1"
    tool: str
    index: str
    asked_at: str
    pinned: str
    changed: tuple[WatchedRelease, ...] = ()
    judged: tuple[VersionName, ...] = ()
    left: tuple[str, ...] = ()
    issues: tuple[str, ...] = ()
    gpu: tuple[GpuStep, ...] = ()

    @property
    def judged_now(self) -> tuple[WatchedRelease, ...]:
        """Rows with a verdict that is new; a known break that is withdrawn since is no new one."""
        return tuple(row for row in self.changed if row.standing is Standing.JUDGED and row.version in self.judged)

    @property
    def breaks(self) -> bool:
        """Whether a release with a new verdict breaks something."""
        return any(row.verdict == 1 for row in self.judged_now)

    @property
    def lacks(self) -> bool:
        """Whether a judgement was tried and given up, or an answer left; one without a wheel yet was not tried."""
        tried = any(row.standing is Standing.WAITING and row.code is not None for row in self.changed)
        return tried or bool(self.left)


class WatchUnreadable(ValueError):
    """A text that is no result of the watch; it says why."""


def read_gpu_steps(told: str) -> tuple[GpuStep, ...]:
    """Steps that wait for a GPU, each once.

    Args:
        told: what the watch told as JSON, or the path of its file.

    Raises:
        WatchUnreadable: neither.
    """
    try:
        text = told if told.lstrip().startswith("{") else Path(told).read_text(encoding="utf-8")
        refuse_what_json_hides(text)
        result = WatchResult.model_validate_json(text)
    except (OSError, ValueError, ValidationError) as fault:
        raise WatchUnreadable(
            f"there are no facts in {told[:80]!r}: {' '.join(str(fault).split())[:300]}. Likely cause: the watch was "
            "cut short. Next step: give the file that `nox -s te_watch -- --format json --output FILE` wrote."
        ) from fault
    return tuple(dict.fromkeys(result.gpu))
