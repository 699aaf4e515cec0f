"""What a report site is written from, and in which order: a row a receipt, and the newest one of each cell."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Final

from packaging.version import Version

from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.evidence.receipt_time import read_time
from megacpp_validate.evidence.selftest import SelftestResult
from megacpp_validate.gate.decision import GateDecision

from ...canary.dynamic.score import Rate
from ..results import Result
from .paths import cell_page, stack_page

MODULES: Final = "bridge modules"
MOST_FULL: Final = 300  # cells with a page of their own, over all targets
MOST_JUDGED: Final = 80  # stacks whose steps are judged, over all targets
_GROUPS: Final = (("fp8_", "FP8"), ("smoke_", "training smoke"))
_OTHERS: Final = "other cells"


class Depth(Enum):
    """How much of a stack is read and shown."""

    FULL = "full"  # a page a cell, with its newest receipt
    JUDGED = "judged"  # its modules are read for the steps that it is a side of; one page for all its cells
    LISTED = "listed"  # nothing is read; one page for all its cells


@dataclass(frozen=True)
class SiteRow:
    """One receipt in one row.

    Attributes:
        run: folder below the store that it lies in; empty where that is the store itself.
        started: ISO 8601, UTC.
        seconds: wall-clock time of the process; None where it was not told, as below.
        probe_seconds: of the probe itself.
        step_seconds: median of a training step.
        peak_memory_mib: most memory of the device.
        compiles_after: kernels that were compiled after warm-up.
        path: of its file, below the store.
        only_times: of a second run that was made for its times alone: it replaces no receipt with all checks.
        same_as: path of another file with the same bytes that stands before it: a copy is no evidence of its own.
        contradicts: path of another file that says it is the same process, and says something else.
        lost: a cell of which there is only a file under its name that is no receipt.
    """

    run: str
    cell: str
    stack: str
    target: str
    probe: str
    outcome: Outcome
    started: str
    path: str
    sha256: str = ""
    commit: str = ""
    image_digest: str = ""
    lock_hash: str = ""
    seconds: float | None = None
    probe_seconds: float | None = None
    step_seconds: float | None = None
    peak_memory_mib: float | None = None
    compiles_after: int | None = None
    only_times: bool = False
    same_as: str = ""
    contradicts: str = ""
    lost: bool = False

    @property
    def counts(self) -> bool:
        """Whether it is an observation of its own whose place is known, as `counts` and `dated` of `HistoryRow`."""
        return self.at > -math.inf and not (self.lost or self.same_as or self.contradicts or self.only_times)

    def is_again_of(self, other: SiteRow) -> bool:
        """Whether it is of the second run, for its times alone, of the run that another row is of."""
        return self.only_times and self.run.rpartition("/")[0] == other.run.removeprefix(".")

    @cached_property
    def at(self) -> float:
        """When it started, in seconds since 1970; minus infinity where it tells no time."""
        return read_instant(self.started)


@dataclass(frozen=True)
class CellHistory:
    """Every receipt of one cell.

    Attributes:
        rows: the newest first; one whose clock ran ahead of the report's comes last, it can outdate nothing.
        future: those rows.
        unreadable: files under the name of the cell that are no receipts; the newest evidence may be one of them.
    """

    rows: tuple[SiteRow, ...]
    future: tuple[SiteRow, ...] = ()
    unreadable: tuple[str, ...] = ()

    @property
    def newest(self) -> SiteRow:
        """The row that counts."""
        return self.rows[0]

    @property
    def not_good(self) -> int:
        """How many of them are no evidence that the cell holds."""
        return sum(not row.outcome.is_good for row in self.rows if not row.same_as)

    @property
    def receipts(self) -> int:
        """How many receipts there are of it, copies apart."""
        return sum(not (row.lost or row.same_as) for row in self.rows)

    @property
    def copies(self) -> int:
        """How many files only say once more what another one says."""
        return sum(bool(row.same_as) for row in self.rows)

    @property
    def earlier(self) -> tuple[SiteRow, ...]:
        """Rows that are known to be no later than the newest one, copies apart."""
        return tuple(row for row in self.rows[1:] if -math.inf < row.at <= self.newest.at and not row.same_as)

    @cached_property
    def doubt(self) -> str:
        """Why the newest receipt does not settle what becomes of the cell; empty where it does.

        It is never hidden that another receipt of the cell may say more than the one that counts.
        """
        if self.newest.contradicts:
            return "contradicted"
        if not self.newest.outcome.is_good:
            return ""
        if self.unreadable:
            return "file lost"
        if self.newest in self.future or any(not row.outcome.is_good for row in self.future):
            return "clock ahead"
        bad = [row for row in self.rows[1:] if not row.outcome.is_good]
        if any(row.only_times and (row.at > self.newest.at or row.is_again_of(self.newest)) for row in bad):
            return "red when timed again"
        return "red without a date" if any(row.at == -math.inf for row in bad) else ""

    @property
    def holds(self) -> bool:
        """Whether there is evidence that the cell holds, and nothing that says otherwise since."""
        return self.newest.outcome.is_good and not self.doubt

    @property
    def contradicted(self) -> tuple[SiteRow, ...]:
        """Rows that tell one process of the cell in two ways: a receipt that was edited, or one that was replayed."""
        return tuple(row for row in self.rows if row.contradicts)


@dataclass(frozen=True)
class StackHistory:
    """Every cell of one stack on one target, by probe."""

    target: str
    stack: str
    cells: Mapping[str, CellHistory]


@dataclass(frozen=True)
class SiteFacts:
    """What a site is written from, receipts apart: those are read one at a time.

    Attributes:
        store: where the receipts lie, as it was named.
        tool: that writes the site.
        made_at: ISO 8601, UTC.
        modules: ids of the bridge modules, in dependency order.
        stacks: by target, the newest release first.
        unreadable: file below the store -> what is wrong with it.
        results: file below the store -> schema of the result of a verb that lies there.
        told: file below the store -> such a result, where its verb tells it as a page.
        scores: file below the store -> kill table of the suite.
        rates: of the suite as it is published, with their intervals and days, and of the newest of `scores`.
        outdated: rates as they were published that the newest of `scores` does not bear out.
        mutants: ids of all that a full run of the selftest has.
        gates: decisions of the release gate.
        foreign_gates: those of them that were made of other receipts than lie in the store.
        depths: (target, stack) -> how much of it is read; `plan_depths` says.
    """

    store: str
    tool: str
    made_at: str
    modules: tuple[str, ...]
    stacks: tuple[StackHistory, ...]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    results: Mapping[str, str] = field(default_factory=dict)
    told: Mapping[str, Result] = field(default_factory=dict)
    scores: Mapping[str, SelftestResult] = field(default_factory=dict)
    rates: tuple[Rate, ...] = ()
    outdated: tuple[Rate, ...] = ()
    mutants: frozenset[str] = frozenset()
    gates: tuple[GateDecision, ...] = ()
    foreign_gates: tuple[GateDecision, ...] = ()
    depths: Mapping[tuple[str, str], Depth] = field(default_factory=dict)

    @cached_property
    def receipts(self) -> int:
        """How many receipts there are."""
        return sum(not row.lost for stack in self.stacks for cell in stack.cells.values() for row in cell.rows)

    def page_of(self, target: str, stack: str, cell: str) -> str:
        """Where a cell is shown: on its own page, or on that of its stack."""
        full = self.depths.get((target, stack), Depth.FULL) is Depth.FULL
        return cell_page(cell) if full else stack_page(target, stack)

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """Every target that a receipt is of."""
        return tuple(dict.fromkeys(stack.target for stack in self.stacks))

    @cached_property
    def runs(self) -> int:
        """How many folders they lie in."""
        return len({row.run for stack in self.stacks for cell in stack.cells.values() for row in cell.rows})


def arrange_stacks(
    rows: Iterable[SiteRow], made_at: str, unreadable: Mapping[str, Sequence[str]] | None = None
) -> tuple[StackHistory, ...]:
    """Rows by target, stack and probe; stacks of one family with the newest release first.

    Args:
        rows: in any order.
        made_at: the report's clock.
        unreadable: cell -> files under its name that are no receipts.
    """
    found: dict[tuple[str, str], dict[str, list[SiteRow]]] = {}
    for row in rows:
        found.setdefault((row.target, row.stack), {}).setdefault(row.probe, []).append(row)
    now = read_instant(made_at)
    # Two sorts, the second of which keeps what the first one ordered: a version has no opposite to sort by.
    newest_first = sorted(found, key=lambda key: _version(key[1]), reverse=True)
    return tuple(
        StackHistory(
            target,
            stack,
            {probe: _arrange_cell(each, now, unreadable or {}) for probe, each in sorted(found[target, stack].items())},
        )
        for target, stack in sorted(newest_first, key=lambda key: (key[0], family(key[1]) != "te", family(key[1])))
    )


def plan_depths(stacks: Sequence[StackHistory]) -> dict[tuple[str, str], Depth]:
    """Which stacks are shown in full: the newest releases of each target, as far as the time of a report goes.

    A page of a receipt takes 20 ms and 100 kB, so that 10,000 cells would be minutes and a GB; to judge a step takes as
    long as to read its receipts. Every target has the same share, and its newest stack always.
    """
    targets = {stack.target for stack in stacks}
    depths: dict[tuple[str, str], Depth] = {}
    shown: dict[str, tuple[int, int]] = {}
    for stack in stacks:
        cells, judged = shown.get(stack.target, (0, 0))
        full = not judged or cells + len(stack.cells) <= MOST_FULL // len(targets)
        depth = Depth.FULL if full else Depth.JUDGED if judged < MOST_JUDGED // len(targets) else Depth.LISTED
        depths[stack.target, stack.stack] = depth
        shown[stack.target] = (cells + len(stack.cells), judged + 1)
    return depths


def family(stack: str) -> str:
    """What stands before the release: "te" of "te2.20.2", all of "native"."""
    return re.match(r"\D*", stack)[0]  # type: ignore[index]  # matches every text


def group_of(probe: str, modules: Sequence[str]) -> str:
    """The group of columns that a probe stands in."""
    if probe in modules:
        return MODULES
    return next((name for start, name in _GROUPS if probe.startswith(start)), _OTHERS)


def group_probes(stacks: Iterable[StackHistory], modules: Sequence[str]) -> dict[str, list[str]]:
    """Probes of some stacks by group: every module, in dependency order, then what else was seen, by name."""
    seen = sorted({probe for stack in stacks for probe in stack.cells})
    groups: dict[str, list[str]] = {MODULES: list(modules)} | {name: [] for _, name in _GROUPS} | {_OTHERS: []}
    for probe in seen:
        if probe not in modules:
            groups[group_of(probe, modules)].append(probe)
    return {name: probes for name, probes in groups.items() if probes}


def read_instant(text: str) -> float:
    """Seconds since 1970 of an ISO time with its zone; minus infinity where it is none."""
    return -math.inf if (told := read_time(text)) is None else told.timestamp()


def _arrange_cell(rows: Sequence[SiteRow], now: float, unreadable: Mapping[str, Sequence[str]]) -> CellHistory:
    newest = sorted(
        rows,
        # Of two from the same moment the one that is not good: which folder's name comes later says nothing. Of copies
        # the first.
        key=lambda row: (not row.only_times, row.at <= now, row.at, not row.outcome.is_good, not row.same_as, row.run),
        reverse=True,
    )
    lost = tuple(unreadable.get(newest[0].cell, ()))
    return CellHistory(tuple(newest), tuple(row for row in newest if row.at > now), lost)


def _version(stack: str) -> tuple[Version, str]:
    """The release that a stack names: te2.12.0 is newer than te2.9.0, and te2.21.0.post1 than te2.21.0.

    Of a name that goes on after it, as no version does, the numbers that it begins with, then the rest as text.
    """
    name = stack.removeprefix(family(stack))
    try:
        return Version(name), ""
    except ValueError:  # of packaging, and of Python where a number has thousands of digits
        numbers = re.match(r"[0-9]{1,9}(\.[0-9]{1,9})*", name)
        return Version(numbers[0] if numbers else "0"), name
