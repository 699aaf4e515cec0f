"""What became of cells over runs: rows of the index, trends, flake rates, and what the verb `history` answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pydantic import Field

from .receipt import Outcome
from .receipt_time import read_time
from .values import Frozen


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """One file of a store that is a receipt, or should be one.

    Attributes:
        run: its folder below the store, "." for the store itself.
        cell: its cell; of an unreadable one what its file's name says.
        stack, target, probe: the parts of the cell; empty where the receipt is unreadable.
        outcome: how it ended; None where the receipt is unreadable, which is no outcome and never a good one.
        started: ISO time.
        seconds_total, seconds_probe: wall-clock time of the process and of the probe in it; None where not measured.
        peak_memory_mib: of the device; 0 where not measured.
        compiles_after: kernels compiled just in time after warm-up.
        step_seconds: median of a training step; None where nothing was trained.
        sha256: of the file's bytes.
        path: of the file below the store, as it can be shown: what is no UTF-8 is escaped.
        environment: identity of the stack that it ran in.
        fault: why it is unreadable; empty where it is not.
        validated: read in full against the schema and against itself. Otherwise its fields alone were read, strictly,
            and its checks were counted.
        same_as: path of another file with the same bytes that stands before it: a copy is not evidence twice.
        contradicts: path of another file that says it is the same process of the same cell, and says something else.
        only_timed: it is good and judged nothing: its module was timed again.
    """

    run: str
    cell: str
    stack: str
    target: str
    probe: str
    outcome: Outcome | None
    started: str
    commit: str
    image_digest: str
    lock_hash: str
    seconds_total: float | None
    seconds_probe: float | None
    peak_memory_mib: float
    compiles_after: int
    sha256: str
    path: str
    step_seconds: float | None = None
    environment: str = ""
    host: str = ""
    gpu: str = ""
    schema_id: str = ""
    reason: str = ""
    fault: str = ""
    validated: bool = False
    same_as: str = ""
    contradicts: str = ""
    only_timed: bool = False

    @property
    def counts(self) -> bool:
        """Whether it is an observation of its own, for rates and trends."""
        return self.outcome is not None and not self.same_as and not self.contradicts and not self.only_timed

    @property
    def dated(self) -> bool:
        """Whether it says when it started, with a zone: without that nobody knows what it came after."""
        return read_time(self.started) is not None


class Direction(StrEnum):
    """Where a quantity goes over runs."""

    RISING = "rising"  # the interval of the slope lies above 0
    FALLING = "falling"  # below 0
    STEADY = "steady"  # 0 is in it
    UNKNOWN = "unknown"  # too few runs for an interval


class TrendPoint(Frozen):
    """One run's value."""

    run: str
    started: str
    commit: str
    value: float


class Trend(Frozen):
    """A quantity of a cell over its runs, oldest first.

    Attributes:
        unit: "s", "ms", "MiB", "tokens/s", or empty for a count or a share.
        points: of runs that passed; copies, contradicted receipts, such as only timed and such without a time are left
            out.
        slope: change a run, as a share of the median: the median of the slopes of all pairs (Theil-Sen).
        low, high: its 95% interval (Sen 1968); None where runs are too few for one.
    """

    cell: str
    quantity: str
    unit: str
    points: tuple[TrendPoint, ...] = ()
    first: float | None = None
    median: float | None = None
    last: float | None = None
    smallest: float | None = None
    largest: float | None = None
    slope: float | None = None
    low: float | None = None
    high: float | None = None
    direction: Direction = Direction.UNKNOWN


class FlakeRate(Frozen):
    """How often a cell goes bad where nothing that is recorded had changed; see `gate.flakes`.

    Attributes:
        states: the same stack, image, lock and commit, observed more than once.
        flaky_states: those of them that came out both good and bad.
        runs: observations in all these states.
        flakes: bad observations in flaky states.
        rate: flakes / runs; None without a state that was observed more than once.
        low, high: its 95% Wilson interval.
        unbound: observations that name no stack or no clean commit, and so belong to no state.
    """

    cell: str
    states: int = 0
    flaky_states: int = 0
    runs: int = 0
    flakes: int = 0
    rate: float | None = None
    low: float = 0.0
    high: float = 1.0
    unbound: int = 0


class CellHistory(Frozen):
    """One cell over all runs of a store; its rows are oldest first, unreadable ones last."""

    cell: str
    rows: tuple[HistoryRow, ...]
    trends: tuple[Trend, ...] = ()
    flakes: FlakeRate


class HistoryResult(Frozen):
    """What the verb `history` answers.

    Attributes:
        store: the folder.
        asked: patterns of cells; empty for all.
        cells: those that match.
        receipts, unreadable, runs: of the whole store.
        lost: files and folders of the store that cannot be read and that no cell was told for, each with why.
        notes: what a person should know: an index that could not be kept.
    """

    schema_id: Literal["megacpp-validate/history/1"] = "megacpp-validate/history/1"
    tool: str
    store: str
    asked: tuple[str, ...] = ()
    cells: tuple[CellHistory, ...] = ()
    receipts: int = 0
    unreadable: int = 0
    runs: int = 0
    lost: dict[str, str] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
