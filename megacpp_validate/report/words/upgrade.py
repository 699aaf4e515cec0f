"""The words of the dynamic tier: what a step between two stacks did, and who is to blame."""

from __future__ import annotations

from typing import Final

from megacpp_validate.evidence.receipt import Outcome

from ...canary.dynamic.upgrade_result import (
    Change,
    Culprit,
    ModuleChange,
    StepResult,
    TimingChange,
    UpgradeResult,
    VersionChange,
)
from ...environments.stacks import StackRun
from ...evidence.values import ENVIRONMENT
from ..describe.firewall import summarize_firewall
from ..describe.static import summarize_static
from ..marks import Mark, mark_cell
from ..summaries import count

_MARKS: Final = {
    Change.REGRESSED: Mark("✗", "X", "regressed", "bad"),
    Change.FIXED: Mark("✓", "-", "fixed", "good"),
    Change.SAME_FAILURE: Mark("✗", "X", "same failure", "bad"),
    Change.LOST: Mark("○", "?", "no evidence", "risk"),
}


def mark_change(row: ModuleChange) -> Mark:
    """How one module of a step looks."""
    if row.under:
        return Mark("↳", ">", f"by {row.under}", "bad")
    if row.change in _MARKS:
        return _MARKS[row.change]
    if row.after is None:
        return Mark("○", "?", "no evidence", "risk")
    seen = mark_cell(row.after)
    if row.change is Change.NEW:
        return seen._replace(word=f"new: {seen.word}")
    return seen._replace(word="unchanged" if row.after.is_good else seen.word)


def say_step(step: StepResult) -> str:
    """From which stack to which."""
    return f"{step.before} → {step.after}"


def say_culprit(culprit: Culprit) -> str:
    """Who, in one phrase: "attention (environment: cuDNN)"."""
    who = "the environment, not a module" if culprit.module == ENVIRONMENT else culprit.module
    component = f": {culprit.component}" if culprit.component else ""
    return f"{who} ({culprit.cause.value}{component})"


def say_cascades(culprit: Culprit) -> str:
    """What is filed under a culprit; empty where nothing is."""
    how = "slower" if culprit.is_slowdown else "changed" if culprit.green else "red"
    named = ", ".join(culprit.cascades)
    return f"{how} because of this, not culprits of their own: {named}" if named else ""


def find_unseen(step: StepResult) -> tuple[str, ...]:
    """Modules that are good now, and were not seen before: nobody knows whether anything of them changed."""
    return tuple(row.module for row in step.modules if row.change is Change.NEW and row.after and row.after.is_good)


def summarize_step(step: StepResult) -> str:
    """The answer for one step in one sentence."""
    said = []
    unseen = find_unseen(step)
    if step.culprits:
        cascades = [name for culprit in step.culprits for name in culprit.cascades]
        with_it = f", and with {'it' if len(step.culprits) == 1 else 'them'} {', '.join(cascades)}" if cascades else ""
        said.append(f"breaks {' and '.join(say_culprit(culprit) for culprit in step.culprits)}{with_it}")
    elif step.lost or unseen:
        said.append("nobody is to blame by what was seen")
    else:
        said.append("breaks nothing")
    for change, word in ((Change.FIXED, "fixes"), (Change.SAME_FAILURE, "leaves red what was red:")):
        if modules := [row.module for row in step.modules if row.change is change]:
            said.append(f"{word} {', '.join(modules)}")
    if step.lost:
        said.append(f"no evidence on {', '.join(step.lost)}")
    if unseen:
        said.append(f"nothing on {step.before} to compare {', '.join(unseen)} with")
    sentence = "; ".join(said)
    return f"{sentence[0].upper()}{sentence[1:]}."


def summarize_upgrade(result: UpgradeResult) -> str:
    """The answer of every tier that was asked for in a few words each."""
    said = []
    if result.static:
        breaking = [step for step in result.static if step.breaks]
        if len(result.static) == 1:
            said.append(f"static: {summarize_static(result.static[0])}")
        else:
            said.append(f"static: {len(breaking)} of {count(len(result.static), 'step')} break the bridge.")
    if result.firewall is not None:
        said.append(f"firewall: {summarize_firewall(result.firewall)}")
    if result.grid is not None:
        said.append(f"dynamic: {_say_dynamic(result)}")
    return " ".join(said) or "No tier was asked for: nothing is known."


def _say_dynamic(result: UpgradeResult) -> str:
    if len(result.steps) == 1:
        return summarize_step(result.steps[0])
    unmade = [stack.stack for stack in result.stacks if stack.problem]
    without = f" {', '.join(unmade)} could not be made usable." if unmade else ""
    if not result.steps:
        return f"there are not two stacks to compare.{without}"
    breaking = [step for step in result.steps if step.breaks]
    if not breaking:
        lost = any(step.lost for step in result.steps)
        return f"none of {count(len(result.steps), 'step')} breaks anything{' that was seen' if lost else ''}.{without}"
    told = [f"{step.after} {' and '.join(culprit.module for culprit in step.culprits)}" for step in breaking]
    verb = "breaks" if len(breaking) == 1 else "break"
    return f"{len(breaking)} of {count(len(result.steps), 'step')} {verb} something: {'; '.join(told)}.{without}"


def say_timing(row: TimingChange) -> str:
    """One use before and after, beside the noise."""
    if not row.noise:
        return f"{row.name}: {row.before_ms:.3g} → {row.after_ms:.3g} ms, {row.derivation}"
    verdict = "slower" if row.slower else "within the noise"
    return (
        f"{row.name}: {row.before_ms:.3g} → {row.after_ms:.3g} ms ({row.ratio:.2f} x; two runs of one stack are apart "
        f"by up to {row.noise:.2f} x): {verdict}"
    )


def find_slower(step: StepResult) -> tuple[TimingChange, ...]:
    """The uses that are slower beyond the noise."""
    return tuple(row for row in step.timings if row.slower)


def say_timings(step: StepResult) -> str:
    """All timings in one sentence; empty where nothing was timed on both sides."""
    if not step.timings:
        return ""
    compared = [row for row in step.timings if row.noise]
    slower, of_all = find_slower(step), count(len(compared), "timed use")
    said = f"{len(slower)} of {of_all} slower beyond the noise of the card" if slower else f"{of_all}: none is slower"
    left = len(step.timings) - len(compared)
    return f"{said}; {left} could not be compared (--verbose says why)" if left else said


def say_version(row: VersionChange) -> str:
    """What else changed: "libcudnn 9.19.0 → 9.21.0"."""
    return f"{row.name} {row.before or 'not loaded'} → {row.after or 'not loaded'}"


def say_outcome(outcome: Outcome | None) -> str:
    """The word of an outcome; that there is none."""
    return "no receipt" if outcome is None else mark_cell(outcome).word


def say_runs(result: UpgradeResult) -> str:
    """How many cells ran, and how many receipts of an earlier run were taken again."""
    ran = sum(len(stack.ran) for stack in result.stacks)
    reused = sum(len(stack.reused) for stack in result.stacks)
    again = f", {count(reused, 'receipt')} of an earlier run taken again (--fresh runs all)" if reused else ""
    return f"{count(ran, 'cell')} run{again}"


def say_stack(stack: StackRun) -> str:
    """Where a stack came from and where its receipts lie."""
    came = f"{stack.environment}; " if stack.environment else ""
    return f"{stack.stack}: {came}receipts and logs: {stack.folder}"


def find_problems(result: UpgradeResult) -> dict[str, str]:
    """Why stacks could not be made usable; those of one reason together."""
    by_reason: dict[str, list[str]] = {}
    for stack in result.stacks:
        if stack.problem:
            by_reason.setdefault(stack.problem, []).append(stack.stack)
    return {", ".join(stacks): reason for reason, stacks in by_reason.items()}


def find_lost(step: StepResult) -> dict[str, str]:
    """Why there is no evidence on cells; those of one reason together."""
    by_reason: dict[str, list[str]] = {}
    for cell, reason in step.lost.items():
        by_reason.setdefault(reason, []).append(cell)
    return {", ".join(cells): reason for reason, cells in by_reason.items()}


def say_seconds(result: UpgradeResult) -> str:
    """Wall-clock time of each tier."""
    return ", ".join(f"{tier} {seconds:.0f} s" for tier, seconds in result.seconds.items())
