"""What a release gate decided, in Markdown: the page of a run, or a text for a release."""

from __future__ import annotations

from megacpp_validate.evidence.release_gate import GateDecision

from ..summaries import first_sentence
from ..words.gate import (
    group_warnings,
    list_others,
    mark_cell_verdict,
    mark_gate,
    mark_gate_waiver,
    name_culprit,
    say_bound,
    say_culprit_lines,
    say_gate,
    say_gate_waiver,
    say_not_counting,
    say_place,
    say_why,
    summarize_gate,
)
from .text import escape


def render_release_gate_markdown(decision: GateDecision) -> str:
    """The answer, a table of cells, culprits, waivers, and what it is bound to."""
    mark = mark_gate(decision)
    lines = [f"## {mark.symbol} Release gate {mark.word}: {escape(say_gate(decision))}", ""]
    lines += [f"**{escape(summarize_gate(decision))}** At {escape(decision.judged_at)}.", ""]
    lines += ["| | cell | why |", "| --- | --- | --- |"]
    for verdict in (*decision.required, *list_others(decision)):
        mark = mark_cell_verdict(verdict)
        why = "; ".join(say_why(verdict, whole=False))
        word = f"{mark.word}, {verdict.waived_by} answers" if verdict.waived_by else mark.word
        lines.append(f"| {mark.symbol} {escape(word)} | {escape(say_place(verdict))} | {escape(why)} |")
    for culprit in decision.culprits:
        lines += ["", f"### {escape(name_culprit(culprit))}", ""]
        lines += [f"- **{label}**: {escape(text)}" for label, text in say_culprit_lines(culprit)]
    if decision.waivers:
        lines += ["", "### Waivers", ""]
    lines += [f"- {mark_gate_waiver(row).symbol} {escape(say_gate_waiver(row))}" for row in decision.waivers]
    if warnings := group_warnings(decision):
        lines += ["", "### To know", ""]
        lines += [f"- {escape(first_sentence(what))} ({escape(', '.join(of))})" for what, of in warnings.items()]
    if quiet := say_not_counting(decision):
        lines += ["", f"Receipts that do not count: {escape('; '.join(quiet))}."]
    lines += ["", *(f"- {escape(line)}" for line in say_bound(decision))]
    return "\n".join(lines) + "\n"
