"""What a release gate decided, in JUnit XML: one suite, one case a required cell, and one for what else closes it."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from megacpp_validate.evidence.release_gate import CellVerdict, GateDecision

from ..words.gate import (
    is_rejected,
    list_others,
    mark_cell_verdict,
    name_culprit,
    say_bound,
    say_gate,
    say_gate_waiver,
    say_not_counting,
    say_place,
    say_why,
    summarize_gate,
)
from .tree import add, add_properties, make, write


def render_release_gate_junit(decision: GateDecision) -> str:
    """A breakage is a failure; evidence that is missing is an error, and never a skip, which would be green."""
    suite = make("testsuite", name=f"release gate {say_gate(decision)}", time="0.000")
    add_properties(suite, {
        "tool": decision.tool, "judged_at": decision.judged_at, "release": decision.release,
        "stack": decision.stack, "target": decision.target, "commit": decision.commit,
        "rules_sha256": decision.rules_sha256, "receipts_sha256": decision.receipts_sha256,
    })  # fmt: skip
    for verdict in (*decision.required, *list_others(decision)):
        _add_case(suite, verdict, decision)
    culprits = [f"culprit: {name_culprit(row)}: {row.summary} Next: {row.next_step}" for row in decision.culprits]
    notes = [*say_not_counting(decision), *map(say_gate_waiver, decision.waivers), *say_bound(decision)]
    add(suite, "system-out", "\n".join([summarize_gate(decision), *culprits, *notes]))
    return write([suite])


def _add_case(suite: ET.Element, verdict: CellVerdict, decision: GateDecision) -> None:
    name = verdict.probe if verdict.required else say_place(verdict)
    case = add(suite, "testcase", name=name, classname=f"release_gate.{decision.release}", time="0.000")
    why = "\n".join(say_why(verdict))
    word = mark_cell_verdict(verdict).word
    if verdict.closes:
        tag = "failure" if is_rejected(verdict) else "error"
        rules = ", ".join(dict.fromkeys(rule.value for rule in verdict.rules))
        add(case, tag, why, message=f"{verdict.cell}: {word} ({rules})", type=verdict.rules[0].value)
    add(case, "system-out", "\n".join(filter(None, [word, why, *verdict.warnings])))
