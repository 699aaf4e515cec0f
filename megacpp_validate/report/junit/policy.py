"""What the policy of low precision says of presets, in JUnit XML: one suite, one case a preset."""

from __future__ import annotations

from ...gate.fp8_policy import PolicyResult
from ..words.presets import mark_preset, preset_lines, say_waiver_row, say_what_runs, summarize_policy
from .tree import add, add_properties, make, write


def render_policy_junit(result: PolicyResult) -> str:
    """A preset on which policy and matrix disagree is a failure."""
    suite = make("testsuite", name="fp8 policy", time="0.000")
    add_properties(suite, {"tool": result.tool, "today": result.today.isoformat(), "rules": str(result.rules)})
    for decision in result.presets:
        case = add(suite, "testcase", name=decision.preset, classname="fp8_policy", time="0.000")
        said = "\n".join(preset_lines(decision))
        word = mark_preset(decision).word
        if not decision.outcome.is_good:
            add(case, "failure", said, message=f"{decision.preset}: {word}", type=decision.outcome.value)
        add(case, "system-out", f"{word}\n{say_what_runs(decision)}\n{said}")
    add(suite, "system-out", "\n".join([summarize_policy(result), *map(say_waiver_row, result.waivers)]))
    return write([suite])
