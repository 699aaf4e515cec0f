"""The upgrade canary's answer in JUnit XML: one suite a step of the dynamic tier, one case a module.

A culprit fails; what is filed under it is an error that names it; lost evidence is skipped with its reason, which makes
no green run: the exit code says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as ET

from megacpp_validate.evidence.receipt import cell_id

from ...canary.dynamic.upgrade_result import Change, Culprit, ModuleChange, StepResult, UpgradeResult
from ...evidence.values import ENVIRONMENT
from ..words.upgrade import say_cascades, say_culprit, say_outcome, say_timing, say_version, summarize_step
from .static_tier import firewall_suite, static_suite
from .tree import add, add_properties, make, write


def render_upgrade_junit(result: UpgradeResult) -> str:
    """Every tier's suites in one file."""
    suites = [static_suite(static) for static in result.static]
    if result.firewall is not None:
        suites.append(firewall_suite(result.firewall))
    if unmade := {stack.stack: stack.problem for stack in result.stacks if stack.problem}:
        suites.append(_unmade_suite(unmade))
    return write([*suites, *(_step_suite(step, result) for step in result.steps)])


def _unmade_suite(unmade: dict[str, str]) -> ET.Element:
    suite = make("testsuite", name="upgrade: stacks that could not be made usable")
    for stack, problem in unmade.items():
        case = add(suite, "testcase", name=stack, classname="upgrade.stacks", time="0.000")
        add(case, "error", problem, message=problem, type="no-environment")
    return suite


def _step_suite(step: StepResult, result: UpgradeResult) -> ET.Element:
    suite = make("testsuite", name=f"upgrade {step.before} to {step.after} on {step.target}")
    add_properties(suite, {"tool": result.tool, **{row.name: say_version(row) for row in step.versions}})
    shared = [culprit for culprit in step.culprits if culprit.module == ENVIRONMENT]
    for culprit in shared:
        case = _case(suite, step, ENVIRONMENT)
        add(case, "failure", _tell(culprit), message=say_culprit(culprit), type=culprit.cause.value)
    for row in step.modules:
        _add_module(suite, step, row, [culprit for culprit in step.culprits if culprit.module == row.module])
    add(suite, "system-out", summarize_step(step))
    return suite


def _add_module(suite: ET.Element, step: StepResult, row: ModuleChange, culprits: Sequence[Culprit]) -> None:
    case = _case(suite, step, row.module)
    lost = step.lost.get(cell_id(step.after, step.target, row.module), "")
    if culprits:
        told, message = "\n\n".join(map(_tell, culprits)), "; ".join(map(say_culprit, culprits))
        add(case, "failure", told, message=message, type=culprits[0].cause.value)
    elif row.under:
        add(case, "error", row.reason, message=f"filed under {row.under}: not a culprit", type="cascade")
    elif lost or row.after is None:
        add(case, "skipped", message=lost or "there is no receipt")
    elif not row.after.is_good:
        add(case, "error", row.reason, message=f"{row.change.value}: {row.reason}", type=row.after.value)
    lines = [f"{say_outcome(row.before)}, then {say_outcome(row.after)}: {row.change.value}"]
    if row.change is Change.NEW and row.reason:
        lines.append(row.reason)
    lines += [say_timing(timing) for timing in step.timings if timing.module == row.module]
    add(case, "system-out", "\n".join(lines))


def _case(suite: ET.Element, step: StepResult, name: str) -> ET.Element:
    classname = f"upgrade.{step.after.replace('.', '_')}.{step.target}"
    return add(suite, "testcase", name=name, classname=classname, time="0.000")


def _tell(culprit: Culprit) -> str:
    lines = [culprit.summary, *culprit.evidence]
    if culprit.cascades:
        lines.append(say_cascades(culprit))
    return "\n".join([*lines, "", f"next: {culprit.next_step}"])
