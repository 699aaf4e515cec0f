"""A result in Markdown, for the page of a run."""

from __future__ import annotations

from typing import assert_never

from ...canary.dynamic.upgrade_result import UpgradeResult
from ...canary.firewall.result import FirewallResult
from ...canary.static.findings import Finding, Impact, ModuleVerdict, StaticResult, Sweep
from ...environments.doctor_result import DoctorResult
from ...environments.session_result import ParityResult, SmokeSession, SupportGrid
from ...gate.fp8_session import Fp8Result
from ...gate.loss_result import LossGateResult
from ...gate.policy_result import PolicyResult
from ..marks import mark_impact, mark_outcome, mark_verdict
from ..results import Result
from ..sections import arrange_modules
from ..summaries import (
    count_impacts,
    first_sentence,
    say_direction,
    say_not_consumed,
    summarize_firewall,
    summarize_static,
    summarize_sweep,
)
from ..words.findings import LIMITS, consequence, headline, headline_of_fault, next_step, next_step_of_fault, place
from .doctor import tell_doctor
from .loss import tell_losses
from .parity import tell_session, tell_support
from .policy import tell_policy
from .text import escape
from .upgrade import tell_upgrade


def render_step_summary(result: Result) -> str:
    """The result as GitHub-flavoured Markdown, for the page of a run."""
    match result:
        case StaticResult():
            lines = [*_tell_static(result, "##"), "", *_tell_limits()]
        case Sweep():
            lines = [*_tell_sweep(result), "", *_tell_limits()]
        case FirewallResult():
            lines = _tell_firewall(result)
        case ParityResult() | Fp8Result() | SmokeSession():
            lines = tell_session(result)
        case SupportGrid():
            lines = tell_support(result)
        case LossGateResult():
            lines = tell_losses(result)
        case PolicyResult():
            lines = tell_policy(result)
        case UpgradeResult():
            lines = _tell_tiers(result)
        case DoctorResult():
            lines = tell_doctor(result)
        case _:
            assert_never(result)
    return "\n".join(lines) + "\n"


def _tell_static(result: StaticResult, level: str) -> list[str]:
    lines = [f"{level} TE {escape(result.old.version)} → {escape(result.new.version)}", ""]
    lines += [f"**{escape(text)}**" for text in (summarize_static(result), say_direction(result)) if text]
    lines += ["", "| bridge module | verdict | findings |", "| --- | --- | --- |"]
    for section in arrange_modules(result):
        mark = mark_verdict(section.row.verdict)
        under = f"filed under {section.row.under}" if section.row.under else ""
        said = "; ".join(filter(None, (count_impacts(section.own), under)))
        lines.append(f"| {escape(section.row.module)} | {mark.symbol} {mark.word} | {escape(said)} |")
    lines.append("")
    lines += _tell_findings(result)
    lines += ["", f"{escape(say_not_consumed(result))}."]
    lines += _fold("Not consumed", [f"- {escape(change)}" for change in result.changes_not_consumed])
    return lines


def _tell_findings(result: StaticResult) -> list[str]:
    loud = [f for f in result.findings if f.impact is not Impact.HARMLESS]
    quiet = [f for f in result.findings if f.impact is Impact.HARMLESS]
    lines = [line for finding in loud for line in _tell_finding(finding, result)]
    lines += _fold("Harmless", [line for finding in quiet for line in _tell_finding(finding, result)])
    faults = [
        f"- {escape(finding.module)}: {escape(headline_of_fault(finding))}; "
        f"next: {escape(next_step_of_fault(finding, result.old.version))}"
        for finding in result.unchanged_faults
    ]
    return lines + _fold(f"Failing in {escape(result.old.version)} already", faults)


def _tell_finding(finding: Finding, result: StaticResult) -> list[str]:
    mark = mark_impact(finding.impact)
    places = [
        f"{escape(label)} <code>{escape(place(line))}</code>"
        for label, line in (
            (result.old.version, finding.before),
            (result.new.version, finding.after),
            *(("consumed", site) for site in finding.call_sites),
        )
        if line is not None
    ]
    lines = [f"- {mark.symbol} {mark.word}, **{escape(finding.module)}**: {escape(headline(finding))}"]
    lines.append(f"  - {escape(consequence(finding))}")
    if places:
        lines.append(f"  - {', '.join(places)}")
    return [*lines, f"  - next: {escape(next_step(finding, result.old.version))}"]


def _tell_sweep(sweep: Sweep) -> list[str]:
    lines = ["## Transformer Engine, release by release", "", f"**{escape(summarize_sweep(sweep))}**", ""]
    arranged = [{section.row.module: section for section in arrange_modules(step)} for step in sweep.steps]
    modules = list(dict.fromkeys(module for sections in arranged for module in sections))
    if modules:
        lines += [
            f"| step | {' | '.join(escape(module) for module in modules)} |",
            "| --- |" + " --- |" * len(modules),
        ]
    for step, sections in zip(sweep.steps, arranged, strict=True):
        cells = []
        for module in modules:
            verdict = sections[module].row.verdict if module in sections else ModuleVerdict.CLEAN
            mark = mark_verdict(verdict)
            cells.append("·" if verdict is ModuleVerdict.CLEAN else f"{mark.symbol} {mark.word}")
        lines.append(f"| {escape(step.old.version)} → {escape(step.new.version)} | {' | '.join(cells)} |")
    lines += [f"\nnot read: {escape(release)}: {escape(reason)}" for release, reason in sweep.unreadable.items()]
    for step in sweep.steps:
        if step.findings or step.unchanged_faults:
            lines += ["", *_tell_static(step, "###")]
    return lines


def _tell_firewall(result: FirewallResult) -> list[str]:
    lines = ["## Import firewall", "", f"**{escape(summarize_firewall(result))}**", ""]
    lines += ["| outcome | case | damage | what the bridge said | ended |", "| --- | --- | --- | --- | --- |"]
    for case in result.cases:
        mark = mark_outcome(case.outcome)
        said = "; ".join(case.problems) or first_sentence(case.reason) or "nothing"
        cells = (case.case, case.damage, said, case.ended or "-")
        lines.append(f"| {mark.symbol} {mark.word} | {' | '.join(escape(cell) for cell in cells)} |")
    return lines


def _tell_tiers(result: UpgradeResult) -> list[str]:
    lines = tell_upgrade(result)
    for static in result.static:
        lines += ["", *_tell_static(static, "###")]
    if result.firewall is not None:
        lines += ["", *_tell_firewall(result.firewall)]
    return lines


def _tell_limits() -> list[str]:
    lines = [f"- {escape(limit.what)}: {escape(limit.why)} Seen by {escape(limit.seen_by)}." for limit in LIMITS]
    return _fold("What a static tier cannot see", lines)


def _fold(title: str, lines: list[str]) -> list[str]:
    if not lines:
        return []
    return ["", f"<details><summary>{title}</summary>", "", *lines, "", "</details>"]
