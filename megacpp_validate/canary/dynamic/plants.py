"""Faults planted in copies of Transformer Engine: what runs on each copy, and what became of it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from ...catalog.bridge import BridgeModule
from ...catalog.te_faults import Fp8Fault, PlantedFault, TeFault
from ...errors import WrongArguments
from ...evidence.receipt import Outcome, Receipt
from .scores import CellSeen, ControlResult, FaultResult, Fp8FaultResult, Verdict
from .slowdown import compare_timings, measure_noise
from .step import StackReceipts, compare_stacks
from .upgrade_result import StepResult

Row = TypeVar("Row", bound=PlantedFault)
Item = TypeVar("Item")
Receipts = Mapping[str, Receipt]
"""Receipts of one run by probe."""

CLEAN: Final = "clean"  # runs of the copied folder itself: without speeds,
CLEAN_TIMED: Final = "clean-timed"  # with speeds,
CLEAN_AGAIN: Final = "clean-again"  # and with speeds a second time
CLEAN_FP8: Final[Mapping[bool, str]] = {True: "clean-quick", False: "clean-whole"}  # by whether shapes are smallest


@dataclass(frozen=True)
class CopyRun:
    """Some cells once, in one copy of a release.

    Attributes:
        name: of its folder below that of the release.
        fault: what is planted; None in a clean one.
        copied: whether it runs in a copy; else in the folder that the copies are made of.
        seed: of weights and inputs.
        times: whether speeds are what it is about; then nothing is judged beside them.
        against: name of the clean run that it is compared with; empty for a clean run itself.
        cells: FP8 cells that run; empty for every probe.
        quick: whether with the smallest shapes.
    """

    name: str
    fault: PlantedFault | None = None
    copied: bool = False
    seed: int = 0
    times: bool = False
    against: str = ""
    cells: tuple[str, ...] = ()
    quick: bool = True


@dataclass
class Troubles:
    """Why a run has no receipts, by name of the run; `everything`: why nothing ran at all."""

    not_planted: dict[str, str] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    everything: str = ""

    def of(self, run: CopyRun) -> str:
        """Of one run; empty where it has none."""
        return self.not_planted.get(run.name) or self.not_run.get(run.name) or self.everything


@dataclass(frozen=True)
class BlamePlan:
    """What is planted in one release for the blame; `controls` are copies without a fault, a seed each."""

    release: str
    seed: int
    faults: tuple[TeFault, ...]
    controls: tuple[CopyRun, ...]

    @property
    def runs(self) -> tuple[CopyRun, ...]:
        """The clean runs that something is compared with, then every copy.

        What is timed has clean runs of its own: one to compare with, and a second one for the noise of the card.
        """
        copies = (*map(self.run_of, self.faults), *self.controls)
        clean = [] if all(run.times for run in copies) else [CopyRun(CLEAN, seed=self.seed)]
        if any(run.times for run in copies):
            clean += [CopyRun(name, seed=self.seed, times=True) for name in (CLEAN_TIMED, CLEAN_AGAIN)]
        return (*clean, *copies)

    def run_of(self, fault: TeFault) -> CopyRun:
        """The run of a fault."""
        against = CLEAN_TIMED if fault.times else CLEAN
        return CopyRun(f"faults/{fault.id}", fault, copied=True, seed=self.seed, times=fault.times, against=against)


@dataclass(frozen=True)
class Fp8Plan:
    """What is planted in one release for the FP8 cells, in the order of the matrix."""

    release: str
    faults: tuple[Fp8Fault, ...]
    seed: int = 0

    @property
    def runs(self) -> tuple[CopyRun, ...]:
        """Clean runs with every cell that a fault names, then each fault with its own cells."""
        clean = []
        for quick, name in CLEAN_FP8.items():
            named = [cell for row in self.faults if row.quick is quick for cell in (*row.cells, row.green)]
            if named:
                clean.append(CopyRun(name, seed=self.seed, cells=tuple(dict.fromkeys(named)), quick=quick))
        return (*clean, *map(self.run_of, self.faults))

    def run_of(self, fault: Fp8Fault) -> CopyRun:
        """The run of a fault."""
        cells = (*fault.cells, fault.green)
        return CopyRun(f"faults/{fault.id}", fault, True, self.seed, False, CLEAN_FP8[fault.quick], cells, fault.quick)


def choose_faults(faults: Sequence[Row], release: str, wanted: Collection[str]) -> list[Row]:
    """The faults of a release that are named; all of the release where none is.

    Raises:
        WrongArguments: an id or a release that no row has.
    """
    known = {fault.id: fault for fault in faults}
    if unknown := sorted(set(wanted) - set(known)):
        raise WrongArguments(
            f"there is no fault {', '.join(map(repr, unknown))}. Next step: choose from {', '.join(known)}."
        )
    chosen = [fault for fault in faults if release in fault.releases and (not wanted or fault.id in wanted)]
    if not chosen:
        releases = sorted({one for fault in faults for one in fault.releases})
        raise WrongArguments(
            f"none of these faults is written for Transformer Engine {release}. Next step: choose a release of "
            f"{', '.join(releases)}, or give rows of the matrix a text for this one."
        )
    return chosen


def plan_blame(
    faults: Sequence[TeFault], release: str, wanted: Collection[str] = (), *, shard: tuple[int, int] = (1, 1),
    controls: int = 0, timed_controls: int = 0, seed: int = 0,
) -> BlamePlan:  # fmt: skip
    """What is planted in a release for the blame.

    Args:
        shard: (I, N): every N-th of them from the I-th on, counted from 1. All shards together are the whole, and each
            has about as many timed rows as the others.
        controls, timed_controls: copies without a fault, of all shards together; they take the seeds after `seed`.

    Raises:
        WrongArguments: an id, a release or a shard that does not exist.
    """
    if not 1 <= shard[0] <= shard[1]:
        raise WrongArguments(f"there is no shard {shard[0]} of {shard[1]}. Next step: --shard I/N with I from 1 to N.")
    chosen = choose_faults(faults, release, wanted)
    if unwritten := [name for name in wanted if name not in {fault.id for fault in chosen}]:
        raise WrongArguments(
            f"{', '.join(unwritten)} is not written for {release}. Next step: choose another release with --release."
        )
    # The timed ones apart, because each of them holds the device alone for seconds.
    rows = [row for times in (False, True) for row in _shard([one for one in chosen if one.times is times], shard)]
    runs = [
        CopyRun(f"controls/control-{number}", copied=True, seed=seed + number, against=CLEAN)
        for number in range(1, controls + 1)
    ]
    timed = [
        CopyRun(f"controls/control-timed-{number}", None, True, seed + controls + number, True, CLEAN_TIMED)
        for number in range(1, timed_controls + 1)
    ]
    ordered = tuple(fault for fault in faults if fault in rows)
    return BlamePlan(release, seed, ordered, (*_shard(runs, shard), *_shard(timed, shard)))


def plan_fp8(faults: Sequence[Fp8Fault], release: str, wanted: Collection[str] = (), seed: int = 0) -> Fp8Plan:
    """What is planted in a release for the FP8 cells.

    Raises:
        WrongArguments: an id or a release that no row has.
    """
    return Fp8Plan(release, tuple(choose_faults(faults, release, wanted)), seed)


def judge_blame(
    plan: BlamePlan, seen: Mapping[str, Receipts], modules: Sequence[BridgeModule], troubles: Troubles
) -> tuple[tuple[FaultResult, ...], tuple[ControlResult, ...]]:
    """Every fault and every control, judged.

    Args:
        seen: receipts by name of the run; a run without any is one that did not run.
        modules: in dependency order.
    """
    noise = measure_noise(seen.get(CLEAN_TIMED, {}), seen.get(CLEAN_AGAIN, {}))

    def blame(run: CopyRun) -> tuple[StepResult | None, str]:
        before, after = seen.get(run.against, {}), seen.get(run.name, {})
        trouble = troubles.of(run) or _why_no_pair([row.id for row in modules], before, after)
        if trouble:
            return None, trouble
        timings = compare_timings(before, after, noise) if run.times else ()
        sides = [StackReceipts(name, tuple(it.values())) for name, it in ((run.against, before), (run.name, after))]
        step = compare_stacks(sides[0], sides[1], modules, timings)
        lost = "; ".join(f"{cell}: {why}" for cell, why in step.lost.items())
        return step, f"no evidence of {lost}" if lost else ""

    faults, controls = [], []
    for fault in plan.faults:
        run = plan.run_of(fault)
        step, trouble = blame(run)
        verdict, reason = _judge_blame(fault, step, trouble)
        if run.name in troubles.not_planted:
            verdict = Verdict.NOT_PLANTED
        faults.append(
            FaultResult(
                fault=fault.id, module=fault.module, cause=fault.cause, release=plan.release, says=fault.says,
                verdict=verdict, culprits=step.culprits if step else (), reason=reason,
                seconds=_seconds(seen.get(run.name, {})),
            )
        )  # fmt: skip
    for run in plan.controls:
        step, trouble = blame(run)
        culprits = step.culprits if step else ()
        controls.append(
            ControlResult(
                name=run.name.removeprefix("controls/"), release=plan.release, seed=run.seed, timed=run.times,
                culprits=culprits, reason="" if culprits else trouble,
            )
        )  # fmt: skip
    return tuple(faults), tuple(controls)


def join_earlier(
    earlier: tuple[tuple[FaultResult, ...], tuple[ControlResult, ...]],
    later: tuple[tuple[FaultResult, ...], tuple[ControlResult, ...]],
) -> tuple[tuple[FaultResult, ...], tuple[ControlResult, ...]]:
    """Two runs of one plan: of each fault the last that ran, and every control that ran."""
    rows = {row.fault: row for row in earlier[0]}
    rows |= {row.fault: row for row in later[0] if row.was_judged or not rows[row.fault].was_judged}
    ran = [row for row in (*earlier[1], *later[1]) if not row.reason]
    names = {row.name for row in ran}
    return tuple(rows.values()), (*ran, *(row for row in later[1] if row.name not in names))


def judge_fp8(plan: Fp8Plan, seen: Mapping[str, Receipts], troubles: Troubles) -> tuple[Fp8FaultResult, ...]:
    """Every fault of the low-precision stack, judged."""
    return tuple(_judge_fp8(plan, fault, seen, troubles) for fault in plan.faults)


def _judge_fp8(plan: Fp8Plan, fault: Fp8Fault, seen: Mapping[str, Receipts], troubles: Troubles) -> Fp8FaultResult:
    run = plan.run_of(fault)
    receipts, clean = seen.get(run.name, {}), seen.get(run.against, {})
    cells = tuple(_look(fault, cell, receipts.get(cell)) for cell in fault.cells)
    green = _look(fault, fault.green, receipts.get(fault.green))
    trouble = troubles.of(run) or _why_no_pair(run.cells, clean)
    if trouble:
        verdict, reason = Verdict.NOT_PLANTED if run.name in troubles.not_planted else Verdict.NOT_RUN, trouble
    else:
        verdict, reason = _judge_cells(cells)
        if green.is_red:
            failed = ", ".join([*green.right, *green.others]) or green.reason
            reason = "; ".join(filter(None, (reason, f"{green.cell}, which must stay green, is red by {failed}")))
    return Fp8FaultResult(
        fault=fault.id, release=plan.release, says=fault.says, verdict=verdict, wants=tuple(fault.checks), cells=cells,
        green=None if trouble else green, reason=reason, seconds=_seconds(receipts),
    )  # fmt: skip


def _judge_blame(fault: TeFault, step: StepResult | None, trouble: str) -> tuple[Verdict, str]:
    if step is None or (not step.culprits and trouble):
        return Verdict.NOT_RUN, trouble
    if not step.culprits:
        return Verdict.MISSED, "every module is as it is in the clean copy"
    right = [culprit for culprit in step.culprits if culprit.module in fault.names]
    named = ", ".join(f"{culprit.module} ({culprit.cause.value})" for culprit in step.culprits)
    if not right:
        return Verdict.WRONG_MODULE, f"{named} instead of {fault.module}"
    if len(step.culprits) > 1:
        return Verdict.OTHERS_TOO, f"{named} instead of {fault.module} alone"
    if right[0].cause not in fault.causes:
        return Verdict.WRONG_CAUSE, f"{named} instead of {fault.cause.value}"
    return Verdict.RIGHT, ""


def _judge_cells(cells: Sequence[CellSeen]) -> tuple[Verdict, str]:
    if lost := [cell for cell in cells if not cell.ran]:
        return Verdict.NOT_RUN, "no evidence of " + "; ".join(f"{cell.cell}: {cell.reason}" for cell in lost)
    green = ", ".join(cell.cell for cell in cells if not cell.is_red)
    if not any(cell.is_red for cell in cells):
        return Verdict.MISSED, f"{green}: as in the clean copy"
    said = [f"{green} stays green"] if green else []
    blind = [cell for cell in cells if cell.is_red and not cell.right]
    said += [f"{cell.cell} is red by {', '.join(cell.others) or cell.reason}" for cell in blind]
    return (Verdict.BY_ANOTHER, "; ".join(said)) if said else (Verdict.CAUGHT, "")


def _look(fault: Fp8Fault, cell: str, receipt: Receipt | None) -> CellSeen:
    if receipt is None:
        return CellSeen(cell=cell, outcome=None, reason="there is no receipt of it")
    failed = [check.name for check in receipt.checks if not check.passed]
    if receipt.failure is not None:
        failed.append(f"raised {receipt.failure.type}")
    return CellSeen(
        cell=cell,
        outcome=receipt.outcome,
        right=tuple(name for name in failed if fault.wants(name)),
        others=tuple(name for name in failed if not fault.wants(name)),
        reason=receipt.reason,
    )


def _why_no_pair(cells: Collection[str], clean: Receipts, copy: Receipts | None = None) -> str:
    """Why a copy cannot be judged beside the clean one: cells are missing, or the clean one is red by itself."""
    sides = {"the clean copy": clean} | ({} if copy is None else {"this copy": copy})
    for side, receipts in sides.items():
        if missing := [one for one in cells if one not in receipts or receipts[one].outcome is Outcome.NOT_RUN]:
            said = "; ".join(receipts[one].reason for one in missing if one in receipts)
            return f"{side} has no evidence of {', '.join(missing)}" + (f": {said}" if said else "")
    if red := [one for one in (cells if copy is None else clean) if not clean[one].outcome.is_good]:
        return f"the clean copy is red by itself in {', '.join(red)}: there is nothing to compare with"
    return ""


def _seconds(receipts: Receipts) -> float:
    return round(sum(receipt.seconds.get("total", 0.0) for receipt in receipts.values()), 1)


def _shard(rows: Sequence[Item], shard: tuple[int, int]) -> list[Item]:
    return list(rows[shard[0] - 1 :: shard[1]])
