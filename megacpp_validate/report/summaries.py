"""The answer in a sentence, and the counts."""

from __future__ import annotations

import re

from ..canary.firewall.result import FirewallOutcome, FirewallResult
from ..canary.static.findings import Finding, Impact, ModuleVerdict, StaticResult, Sweep
from .marks import mark_impact


def count(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def count_impacts(findings: tuple[Finding, ...]) -> str:
    """How many of each impact, "1 breaking, 2 risk"; empty where there is none."""
    numbers = {impact: sum(finding.impact is impact for finding in findings) for impact in Impact}
    return ", ".join(f"{number} {mark_impact(impact).word}" for impact, number in numbers.items() if number)


def summarize_static(result: StaticResult) -> str:
    """The answer in one sentence."""
    by_verdict = {
        verdict: [row.module for row in result.modules if row.verdict is verdict] for verdict in ModuleVerdict
    }
    culprits, cascades = by_verdict[ModuleVerdict.BREAKS], by_verdict[ModuleVerdict.CASCADE]
    if culprits or cascades or result.breaks:
        return _say_breakage(culprits, cascades, len(result.modules))
    if at_risk := by_verdict[ModuleVerdict.RISK]:
        return f"Nothing breaks; {', '.join(at_risk)} at risk."
    if result.findings:
        return "Nothing breaks: what changed in what the bridge consumes does not touch its calls."
    return "Nothing that the bridge consumes changed."


def summarize_sweep(sweep: Sweep) -> str:
    """The answer in one sentence."""
    steps = count(len(sweep.steps), "step")
    breaking = sum(step.breaks for step in sweep.steps)
    at_risk = sum(
        not step.breaks and any(row.verdict is ModuleVerdict.RISK for row in step.modules) for step in sweep.steps
    )
    risk = f", {at_risk} {'puts' if at_risk == 1 else 'put'} it at risk" if at_risk else ""
    unread = f"; {count(len(sweep.unreadable), 'release')} could not be read" if sweep.unreadable else ""
    if not sweep.steps:
        return f"No step between releases was compared{unread}."
    if not breaking:
        return f"None of {steps} breaks the bridge{risk}{unread}."
    verb = "breaks" if breaking == 1 else "break"
    return f"{breaking} of {steps} {verb} the bridge{risk}{unread}."


def say_not_consumed(result: StaticResult) -> str:
    """How many changes the bridge has nothing to do with."""
    changes = count(result.not_consumed, "API change")
    return f"{changes} that the bridge does not consume"


def say_direction(result: StaticResult) -> str:
    """That the step goes backwards; empty where it does not."""
    if not result.downgrade:
        return ""
    return f"This is a downgrade: {result.old.version} is the newer release of the two."


def summarize_firewall(result: FirewallResult) -> str:
    """The answer in one sentence."""
    if not result.cases:
        return "No case ran: nothing is known about the firewall."
    ends = {outcome: sum(case.outcome is outcome for case in result.cases) for outcome in FirewallOutcome}
    if result.holds:
        return f"The firewall holds in {count(len(result.cases), 'case')}."
    parts = [
        f"fails in {ends[FirewallOutcome.FAIL]}" if ends[FirewallOutcome.FAIL] else "",
        f"was not tried in {ends[FirewallOutcome.NOT_RUN]}" if ends[FirewallOutcome.NOT_RUN] else "",
        f"holds in {ends[FirewallOutcome.PASS]}",
    ]
    return f"The firewall {', '.join(filter(None, parts))} of {count(len(result.cases), 'case')}."


def first_sentence(text: str) -> str:
    """The first sentence of a reason; a full stop inside a version or a file name does not end one."""
    line = " ".join(text.split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", line, maxsplit=1)[0]


def split_reason(reason: str) -> tuple[str, str]:
    """The likely cause and the next step that a reason of the bridge names; its first sentence where it names none."""
    line = " ".join(reason.split())
    cause = re.search(r"Likely cause: (.+?)\.?(?= Next step:| Found:|$)", line)
    step = re.search(r"Next step: (.+?)\.?(?= Found:|$)", line)
    said = cause[1] if cause else first_sentence(line.partition(" Next step:")[0])
    return said, step[1] if step else ""


def _say_breakage(culprits: list[str], cascades: list[str], modules: int) -> str:
    who = ", ".join(culprits) or "something that the bridge consumes"
    with_it = "it" if len(culprits) == 1 else "them"
    also = f", and with {with_it} {', '.join(cascades)}" if cascades else ""
    number = len(culprits) + len(cascades)
    share = f" ({number} of {count(modules, 'module')})" if number else ""
    return f"Breaks {who}{also}{share}."
