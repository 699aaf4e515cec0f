"""What a release gate decided, as annotations."""

from __future__ import annotations

from megacpp_validate.evidence.release_gate import CellVerdict, GateDecision

from ...evidence.release_gate import WaiverState
from ..words.gate import (
    group_warnings,
    mark_cell_verdict,
    name_culprit,
    say_gate,
    say_gate_waiver,
    say_place,
    say_why,
    summarize_gate,
)
from .annotations import write_command


def render_release_gate_annotations(decision: GateDecision) -> str:
    """An error a culprit and a cell without evidence, a warning what a person should know; the answer as a notice.

    A run shows ten annotations of a sort: cells that are red by a culprit are in its own, and in the log.
    """
    where = say_gate(decision)
    lines = [
        write_command(
            "error",
            f"{culprit.summary.rstrip('.')}. With it: {', '.join(culprit.cascades) or 'nothing'}. "
            f"Next: {culprit.next_step}",
            f"{name_culprit(culprit)} ({where})",
        )
        for culprit in decision.culprits
    ]
    named = {name for culprit in decision.culprits for name in (culprit.module, *culprit.cascades)}
    told = (verdict for verdict in decision.cells if verdict.required or verdict.closes or verdict.waived_by)
    lines += [_annotate(verdict, where, verdict.probe in named) for verdict in told]
    lines += [
        write_command("warning", f"{warning} ({', '.join(probes)})", f"to know ({where})")
        for warning, probes in group_warnings(decision).items()
    ]
    lines += [
        write_command("warning", say_gate_waiver(waiver), f"waiver of {waiver.rule.value} for {waiver.cell}")
        for waiver in decision.waivers
        if waiver.in_vain or waiver.state is not WaiverState.HOLDS
    ]
    level = "notice" if decision.open else "error"
    lines.append(write_command(level, summarize_gate(decision), f"release gate: {where}"))
    return "".join(f"{line}\n" for line in lines)


def _annotate(verdict: CellVerdict, where: str, is_told: bool) -> str:
    word = mark_cell_verdict(verdict).word
    message = "\n".join(say_why(verdict)) or word
    title = f"{say_place(verdict)}: {word} ({where})"
    only_red = not any(rule.of_evidence for rule in verdict.rules)
    if verdict.closes and not (is_told and only_red):
        return write_command("error", message, title)
    if verdict.waived_by:
        return write_command("warning", message, title)
    return write_command("debug", f"{title}. {message}")
