"""What the blame of planted faults and of clean pairs is worth. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...catalog.bridge import BridgeModule
from ...catalog.te_faults import TeFault
from ...evidence.receipt import Outcome, Receipt
from .blame_score import ControlResult, FaultResult, Verdict
from .slowdown import compare_timings, measure_noise
from .step import StackReceipts, compare_stacks
from .te_fault_plan import CLEAN_AGAIN, CLEAN_TIMED, Control, CopyRun, Plan
from .upgrade_result import Culprit, StepResult

Receipts = Mapping[str, Receipt]
"""Receipts of one run by probe."""


@dataclass
class Troubles:
    """Why a run has no receipts.

    Attributes:
        not_planted: its edits do not fit, by name of the run.
        not_run: it could not be made, by name of the run.
        everything: why nothing ran at all; empty where something did.
    """

    not_planted: dict[str, str] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    everything: str = ""

    def of(self, run: CopyRun) -> str:
        """Of one run; empty where it has none."""
        return self.not_planted.get(run.name) or self.not_run.get(run.name) or self.everything


@dataclass(frozen=True)
class Verdicts:
    """Every fault and every clean pair, judged."""

    faults: tuple[FaultResult, ...]
    controls: tuple[ControlResult, ...]

    def joined(self, later: Verdicts) -> Verdicts:
        """With those of a later run of the plan: of each fault the last that ran, and every clean pair that ran."""
        rows = {row.fault: row for row in self.faults}
        rows |= {row.fault: row for row in later.faults if row.was_judged or not rows[row.fault].was_judged}
        both = (*self.controls, *later.controls)
        ran = {row.name for row in both if not row.reason}
        lacking = tuple(row for row in later.controls if row.name not in ran)
        return Verdicts(tuple(rows.values()), (*(row for row in both if not row.reason), *lacking))


def judge_plan(
    plan: Plan, seen: Mapping[str, Receipts], modules: Sequence[BridgeModule], troubles: Troubles
) -> Verdicts:
    """Judge everything that was planned.

    Args:
        plan: what was planned.
        seen: receipts by name of the run; a run without any is one that did not run.
        modules: in dependency order.
        troubles: why runs have no receipts.
    """
    noise = measure_noise(seen.get(CLEAN_TIMED, {}), seen.get(CLEAN_AGAIN, {}))

    def blame(run: CopyRun) -> tuple[StepResult | None, str]:
        before, after = seen.get(run.against, {}), seen.get(run.name, {})
        if trouble := troubles.of(run) or _why_no_pair(before, after, modules):
            return None, trouble
        timings = compare_timings(before, after, noise) if run.times else ()
        return compare_stacks(_stack(run.against, before), _stack(run.name, after), modules, timings), ""

    faults = []
    for row in plan.faults:
        run = plan.run_of(row)
        step, trouble = blame(run)
        seconds = sum(receipt.seconds.get("total", 0.0) for receipt in seen.get(run.name, {}).values())
        planted = run.name not in troubles.not_planted
        faults.append(judge_fault(row, plan.release, step, trouble=trouble, planted=planted, seconds=seconds))
    controls = []
    for control in plan.controls:
        step, trouble = blame(plan.run_of(control))
        controls.append(judge_control(control, plan.release, step, trouble=trouble))
    return Verdicts(tuple(faults), tuple(controls))


def _stack(name: str, receipts: Receipts) -> StackReceipts:
    return StackReceipts(name, tuple(receipts.values()))


def _why_no_pair(before: Receipts, after: Receipts, modules: Sequence[BridgeModule]) -> str:
    """Why two runs cannot be compared: cells missing on either side, or a clean copy that is red by itself."""
    for side, receipts in (("the clean copy", before), ("this copy", after)):
        ran = {probe for probe, receipt in receipts.items() if receipt.outcome is not Outcome.NOT_RUN}
        if missing := [module.id for module in modules if module.id not in ran]:
            return f"{side} has no evidence of {', '.join(missing)}"
    if red := [probe for probe, receipt in before.items() if not receipt.outcome.is_good]:
        return f"the clean copy is red by itself in {', '.join(red)}: there is nothing to compare with"
    return ""


def judge_fault(
    fault: TeFault, release: str, step: StepResult | None, *, trouble: str = "", planted: bool = True,
    seconds: float = 0.0,
) -> FaultResult:  # fmt: skip
    """What the blame of the step from the clean copy to the faulty one is worth.

    Args:
        fault: what was planted.
        release: where.
        step: the blame; None where it did not come to one.
        trouble: why it did not.
        planted: whether the edits fitted the copy.
        seconds: of its cells.
    """
    verdict, reason = _judge(fault, step, trouble, planted)
    return FaultResult(
        fault=fault.id,
        module=fault.module,
        cause=fault.cause,
        release=release,
        says=fault.says,
        verdict=verdict,
        culprits=() if step is None else step.culprits,
        reason=reason,
        seconds=round(seconds, 1),
    )


def _judge(fault: TeFault, step: StepResult | None, trouble: str, planted: bool) -> tuple[Verdict, str]:
    if not planted:
        return Verdict.NOT_PLANTED, trouble
    if step is None:
        return Verdict.NOT_RUN, trouble or "there is no run of it"
    if step.culprits:
        return _judge_culprits(fault, step.culprits)
    if step.lost:
        return Verdict.NOT_RUN, _say_lost(step)
    return Verdict.MISSED, "every module is as it is in the clean copy"


def _judge_culprits(fault: TeFault, culprits: Sequence[Culprit]) -> tuple[Verdict, str]:
    right = [culprit for culprit in culprits if culprit.module in fault.names]
    others = [culprit for culprit in culprits if culprit not in right]
    if not right:
        return Verdict.WRONG_MODULE, f"{_say(others)} instead of {fault.module}"
    if others:
        return Verdict.OTHERS_TOO, f"{_say(others)} beside {fault.module}"
    if len(right) > 1:  # the module, and the environment: one fault told twice
        return Verdict.OTHERS_TOO, f"one fault is told as {_say(right)}"
    if right[0].cause not in fault.causes:
        return Verdict.WRONG_CAUSE, f"{_say(right)} instead of {fault.cause.value}"
    return Verdict.RIGHT, ""


def judge_control(control: Control, release: str, step: StepResult | None, *, trouble: str = "") -> ControlResult:
    """What the blame of a copy without a fault is worth."""
    if step is None:
        reason = trouble or "there is no run of it"
    elif step.lost:  # a pair with cells missing is no clean pair, even where nobody is named
        reason = _say_lost(step)
    else:
        reason = ""
    culprits = () if step is None else step.culprits
    return ControlResult(
        name=control.name,
        release=release,
        seed=control.seed,
        timed=control.timed,
        culprits=culprits,
        reason="" if culprits else reason,
    )


def _say(culprits: Sequence[Culprit]) -> str:
    return ", ".join(f"{culprit.module} ({culprit.cause.value})" for culprit in culprits)


def _say_lost(step: StepResult) -> str:
    return "no evidence of " + "; ".join(f"{cell}: {why}" for cell, why in step.lost.items())
