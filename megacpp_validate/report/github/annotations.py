"""Annotations for a continuous integration that reads workflow commands.

Escaping follows https://docs.github.com/actions/reference/workflow-commands-for-github-actions
and `command.ts` of actions/toolkit: in a message %, CR and LF; in a property `:` and `,` too.
"""

from __future__ import annotations

import re
from typing import assert_never

from megacpp_validate.evidence.receipt import Outcome

from ...canary.dynamic.upgrade_result import UpgradeResult
from ...canary.firewall.result import FirewallOutcome, FirewallResult
from ...canary.static.findings import Finding, Impact, ModuleVerdict, StaticResult, Sweep
from ...environments.session_result import SessionResult
from ...evidence.values import SourceLine
from ...gate.loss_result import LossOutcome
from ..markdown.static_tier import render_step_summary
from ..marks import mark_cell
from ..summaries import first_sentence, summarize_static
from ..words.findings import consequence, headline, headline_of_fault, next_step
from ..words.loss import find_losses, say_loss, say_loss_missing
from ..words.parity import (
    find_failed,
    find_fallbacks,
    say_cause,
    say_fallback,
    say_next_step,
    say_red_policy,
    say_subject,
    summarize_session,
)
from ..words.upgrade import say_culprit, say_step, summarize_step

__all__ = [
    "render_firewall_annotations",
    "render_session_annotations",
    "render_static_annotations",
    "render_step_summary",
    "render_sweep_annotations",
    "render_upgrade_annotations",
]


def render_static_annotations(result: StaticResult) -> str:
    """One command a finding, at the first place where the bridge consumes it; the answer as a notice."""
    step = f"TE {result.old.version} -> {result.new.version}"
    lines = [_annotate(finding, result, step) for finding in result.findings]
    for finding in result.unchanged_faults:
        message = f"{headline_of_fault(finding)}. Failing in {result.old.version} already: not this step's doing."
        title = f"{finding.module} already fails ({step})"
        lines.append(write_command("warning", message, title, _first(finding)))
    lines += [
        write_command("error", f"filed under {row.under}: not a culprit", f"{row.module} breaks too ({step})")
        for row in result.modules
        if row.verdict is ModuleVerdict.CASCADE
    ]
    lines.append(write_command("notice", summarize_static(result), step))
    return "\n".join(lines) + "\n"


def render_sweep_annotations(sweep: Sweep) -> str:
    """The annotations of every step, and a warning for each release that could not be read."""
    steps = "".join(render_static_annotations(step) for step in sweep.steps)
    unread = (write_command("warning", why, f"TE {release} not read") for release, why in sweep.unreadable.items())
    return steps + "".join(f"{line}\n" for line in unread)


def render_firewall_annotations(result: FirewallResult) -> str:
    """One command a case: an error where the firewall fails, a warning where it was not tried."""
    lines = []
    for case in result.cases:
        problems = "; ".join(case.problems)
        match case.outcome:
            case FirewallOutcome.FAIL:
                message = f"{problems or 'not as expected'}. Damage: {case.damage}. Reason given: {case.reason}"
                lines.append(write_command("error", message, f"import firewall: {case.case}"))
            case FirewallOutcome.NOT_RUN:
                message = f"not run: {problems or case.reason or 'no reason given'}"
                lines.append(write_command("warning", message, f"import firewall: {case.case}"))
            case FirewallOutcome.PASS:
                message = f"holds: {first_sentence(case.reason) or case.damage}"
                lines.append(write_command("debug", f"import firewall: {case.case} {message}"))
            case _:
                assert_never(case.outcome)
    return "".join(f"{line}\n" for line in lines)


def render_session_annotations(result: SessionResult) -> str:
    """One command a probe that is not good: an error where it ran, a warning where it did not; then the answer."""
    where = f"{result.stack} on {result.target}"
    lines = []
    for receipt in result.receipts:
        if receipt.outcome.is_good:
            lines.append(write_command("debug", f"{receipt.cell}: {mark_cell(receipt.outcome).word}"))
            continue
        said = [say_cause(receipt), *map(say_fallback, find_fallbacks(receipt))]
        if failed := find_failed(receipt):
            said.append(f"Out of bounds: {', '.join(check.name for check in failed)}")
        message = f"{'. '.join(part.rstrip('.') for part in said)}. Next: {say_next_step(receipt)}"
        level = "warning" if receipt.outcome is Outcome.NOT_RUN else "error"
        lines.append(write_command(level, message, f"{receipt.probe}: {mark_cell(receipt.outcome).word} ({where})"))
    for verdict in find_losses(result):
        if verdict.outcome is LossOutcome.PASS:
            lines.append(write_command("debug", say_loss(verdict)))
        else:
            level = "error" if verdict.outcome is LossOutcome.FAIL else "warning"
            lines.append(
                write_command(level, say_loss(verdict), f"loss gate: {verdict.recipe or 'no recipe'} ({where})")
            )
    if missing := say_loss_missing(result):
        lines.append(write_command("warning", f"no verdict on the loss: {missing}", f"loss gate ({where})"))
    if refused := say_red_policy(result):
        lines.append(write_command("error", refused, f"policy of low precision ({where})"))
    lines.append(write_command("notice", summarize_session(result), f"{say_subject(result)} of {where}"))
    return "".join(f"{line}\n" for line in lines)


def render_upgrade_annotations(result: UpgradeResult) -> str:
    """Every tier's commands: an error a culprit, a warning where evidence is lost, a notice a step."""
    told = [render_static_annotations(static) for static in result.static]
    if result.firewall is not None:
        told.append(render_firewall_annotations(result.firewall))
    lines = []
    for step in result.steps:
        where = f"{say_step(step)} on {step.target}"
        for culprit in step.culprits:
            message = f"{culprit.summary.rstrip('.')}. {'. '.join(culprit.evidence)} Next: {culprit.next_step}"
            lines.append(write_command("error", message, f"{say_culprit(culprit)} ({where})"))
        lines += [
            write_command("warning", reason, f"no evidence: {cell} ({where})") for cell, reason in step.lost.items()
        ]
        lines.append(write_command("notice", summarize_step(step), where))
    lines += [
        write_command("warning", stack.problem, f"{stack.stack} could not be made usable")
        for stack in result.stacks
        if stack.problem
    ]
    return "".join([*told, *(f"{line}\n" for line in lines)])


def _annotate(finding: Finding, result: StaticResult, step: str) -> str:
    message = f"{headline(finding)}. {consequence(finding)} Next: {next_step(finding, result.old.version)}"
    site = _first(finding)
    match finding.impact:
        case Impact.BREAKING:
            return write_command("error", message, f"{finding.module} breaks ({step})", site)
        case Impact.RISK:
            level = "notice" if finding.follows else "warning"
            return write_command(level, message, f"{finding.module} at risk ({step})", site)
        case Impact.HARMLESS:
            # A run shows ten annotations of a sort; these would only push others out. The log has them.
            return write_command("debug", f"{finding.module}: {message}")
        case _:
            assert_never(finding.impact)


def _first(finding: Finding) -> SourceLine | None:
    return finding.call_sites[0] if finding.call_sites else None


def write_command(level: str, message: str, title: str = "", site: SourceLine | None = None) -> str:
    """One workflow command, escaped."""
    properties = {}
    if site is not None:
        properties = {"file": site.file, "line": str(max(site.line, 1))}
    if title:
        properties["title"] = title
    listed = ",".join(f"{name}={_escape_property(value)}" for name, value in properties.items())
    return f"::{level}{' ' + listed if listed else ''}::{_escape_message(message)}"


def _escape_message(text: str) -> str:
    text = re.sub(r"[\x00-\x09\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029]", " ", text)
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_message(text).replace(":", "%3A").replace(",", "%2C")
