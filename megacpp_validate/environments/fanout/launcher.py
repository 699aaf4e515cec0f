"""What every launcher does: it takes a cell, says what became of it, and gives it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

from ...probes.order import Order
from ..environment import Environment

JOB_FILE: Final = "job"
CLAIM: Final = "claimed"  # a folder: whoever makes it runs the attempt
NODE_FILE: Final = "node"
BATCH_LOG: Final = "batch.log"


class SchedulerDown(RuntimeError):
    """The scheduler does not answer, or is not here; jobs that it has are left to it."""


class SchedulerAbsent(SchedulerDown):
    """Its tools are not here, or cannot be started: what they were to be told they were not told."""


class JobRefused(RuntimeError):
    """The scheduler answers, and does not take the job."""


class JobHeld(RuntimeError):
    """The scheduler takes the job when others have ended."""


class Phase(StrEnum):
    """How far a job came, as the scheduler sees it."""

    QUEUED = "queued"
    RUNS = "runs"
    OVER = "over"
    GONE = "gone"  # the scheduler does not know it, or not any more


@dataclass(frozen=True)
class Seen:
    """What a scheduler says of one attempt.

    Attributes:
        phase: how far it came.
        word: the scheduler's own word for it.
        because: why it waits or ended, where the scheduler tells.
        node: where it runs or ran; empty where nobody knows.
        id: the scheduler's number.
    """

    phase: Phase
    word: str = ""
    because: str = ""
    node: str = ""
    id: str = ""


@dataclass(frozen=True)
class Work:
    """One cell as a job.

    Attributes:
        order: what its probe is told.
        environment: where it runs.
        limit_s: seconds that the cell may take.
        gpus: that it needs.
        seconds: that it is expected to take.
        ground: cells of this run which decide whether it is run at all.
    """

    order: Order
    environment: Environment
    limit_s: float
    gpus: int
    seconds: float = 0.0
    ground: tuple[str, ...] = ()


@dataclass(frozen=True)
class Try:
    """One attempt at a cell.

    Attributes:
        name: that no other attempt of any run has; the scheduler is asked by it.
        id: the scheduler's number; empty until it is known.
        folder: of this attempt alone: its receipt appears there.
        avoid: nodes that an earlier attempt came to nothing by.
    """

    name: str
    id: str
    folder: Path
    avoid: tuple[str, ...] = ()


class Launcher(Protocol):
    """A way to run jobs."""

    @property
    def survives(self) -> bool:
        """Whether its jobs go on when the tool that started them has ended."""

    def takes(self, work: Work, running: int) -> bool:
        """Whether it takes a job now, beside so many that it has."""

    def submit(self, work: Work, attempt: Try) -> str:
        """Start a job; the scheduler's number of it.

        Raises:
            SchedulerDown, JobRefused, JobHeld: see there.
            OSError: the folder of the attempt cannot be written.
        """

    def look(self, attempts: Sequence[Try]) -> Mapping[str, Seen]:
        """What became of each, by name.

        Raises:
            SchedulerDown: see there.
        """

    def cancel(self, attempts: Sequence[Try]) -> None:
        """End them, started or not; those that have ended already are nobody's fault.

        Raises:
            SchedulerDown: see there.
        """

    def close(self) -> None:
        """Let go of what the launcher itself holds."""
