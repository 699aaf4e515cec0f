"""What the policy of low precision says of presets, in Markdown."""

from __future__ import annotations

from ...gate.fp8_policy import PolicyResult, PresetDecision
from ..words.presets import (
    find_faults,
    group_refusals,
    mark_preset,
    mark_waiver,
    say_waiver,
    say_waiver_row,
    say_what_runs,
    say_why,
    summarize_policy,
)
from .text import escape


def tell_policy(result: PolicyResult) -> list[str]:
    """A table of presets, then every refusal with its reason, and every waiver."""
    lines = [f"## What may run in low precision, on {result.today}", "", f"**{escape(summarize_policy(result))}**", ""]
    lines += ["| | preset | what it is | what runs in low precision | refused by |", "| --- | --- | --- | --- | --- |"]
    for decision in result.presets:
        mark = mark_preset(decision)
        cells = (decision.preset, decision.says, say_what_runs(decision), _say_rules(decision))
        lines.append(f"| {mark.symbol} {mark.word} | {' | '.join(escape(cell) for cell in cells)} |")
    for decision in result.presets:
        lines += _tell_preset(decision)
    if result.waivers:
        lines += ["", "### Waivers", ""]
    for waiver in result.waivers:
        lines.append(f"- {mark_waiver(waiver).symbol} {escape(say_waiver_row(waiver))}")
    return lines


def _say_rules(decision: PresetDecision) -> str:
    rules: dict[str, str] = {}
    for refusal in decision.refusals:
        until = refusal.waived_until
        rules[refusal.rule] = f"{refusal.rule}, waived until {until}" if until else refusal.rule
    return "; ".join(rules.values())


def _tell_preset(decision: PresetDecision) -> list[str]:
    faults = find_faults(decision)
    if not decision.refusals and not faults:
        return []
    mark = mark_preset(decision)
    lines = ["", f"### {escape(decision.preset)}: {mark.word}", ""]
    lines += [f"- **wrong**: {escape(fault)}" for fault in faults]
    for refusal, said in group_refusals(decision):
        lines.append(f"- **{'may not' if refusal.waived_until is None else 'waived'}**: {escape(said)}")
        lines.append(f"  - why: {escape(say_why(refusal))}")
        if refusal.waiver is not None:
            lines.append(f"  - waiver: {escape(say_waiver(refusal))}")
        lines.append(f"  - next: {escape(refusal.next)}")
    return lines
