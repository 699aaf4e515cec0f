"""What the policy of low precision says of presets, as annotations."""

from __future__ import annotations

from ...gate.decision import WaiverState
from ...gate.fp8_policy import PolicyResult, PresetDecision, PresetOutcome
from ..words.presets import (
    find_faults,
    group_refusals,
    mark_preset,
    say_waiver,
    say_waiver_row,
    say_why,
    summarize_policy,
)
from .annotations import write_command


def render_policy_annotations(result: PolicyResult) -> str:
    """An error a preset on which policy and matrix disagree, a warning a waiver that holds or is of no use."""
    lines = [_annotate(decision) for decision in result.presets]
    lines += [
        write_command("warning", say_waiver_row(waiver), f"waiver of {waiver.rule} for {waiver.preset}")
        for waiver in result.waivers
        if waiver.state is not WaiverState.HOLDS
    ]
    lines.append(write_command("notice", summarize_policy(result), f"FP8 policy on {result.today}"))
    return "".join(f"{line}\n" for line in lines)


def _annotate(decision: PresetDecision) -> str:
    said = find_faults(decision)
    for refusal, refused in group_refusals(decision):
        waiver = f" Waiver {say_waiver(refusal)}." if refusal.waiver is not None else ""
        said.append(f"{refused}. Why: {say_why(refusal)}.{waiver} Next: {refusal.next}")
    message = "\n".join(said) or decision.says
    title = f"preset {decision.preset}: {mark_preset(decision).word}"
    if not decision.outcome.is_good:
        return write_command("error", message, title)
    if decision.outcome is PresetOutcome.WAIVED:
        return write_command("warning", message, title)
    return write_command("debug", f"{title}. {message}")
