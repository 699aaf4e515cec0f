"""What the policy of low precision says of presets, in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from megacpp_validate.text import count

from ...gate.fp8 import PolicyResult, PresetDecision, PresetOutcome
from ..document import Content, Diagnostic, Document
from ..marks import bad, good, mark_of
from .words import join_same

_WORDS: Final = {
    PresetOutcome.ROLLED_BACK: "refused, as it must be",
    PresetOutcome.NOT_REFUSED: "not refused, and it must be",
}


def describe_policy(result: PolicyResult) -> Document:
    """The answer, and each preset with every refusal and its reason."""
    cases = tuple(map(_describe_preset, result.presets))
    words = "; ".join(f"{word}: {names}" for names, word in join_same((one.name, one.mark.word) for one in cases))
    summary = f"{count(result.rules, 'rule')}. {words or 'No preset was selected'}."
    mark = good("agrees") if result.holds else bad("disagrees")
    return Document("Low-precision policy", summary, mark, cases, cases)


def _describe_preset(decision: PresetDecision) -> Diagnostic:
    runs = join_same((part, low.recipe) for low in decision.low for part in low.parts)
    fields: list[tuple[str, Content]] = [
        ("runs", tuple(f"{recipe}: {parts}" for parts, recipe in runs) or "everything in BF16"),
        ("in BF16", f"first {decision.bf16_first} and last {decision.bf16_last} of {decision.layers} layers"),
        ("targets", ", ".join(decision.targets)),
        (
            "not refused",
            tuple(
                f"the rule {rule} must refuse this preset and refuses nothing of it" for rule in decision.not_refused_by
            ),
        ),
    ]
    for rule in dict.fromkeys(refusal.rule for refusal in decision.refusals):
        group = [refusal for refusal in decision.refusals if refusal.rule == rule]
        first, found = group[0], "; ".join(one.found for one in group)
        fields += [("refused", f"{first.refuses} [{rule}]: {found}"), ("why", first.reason), ("source", first.source)]
        fields.append(("next", first.next))
    step = "put the rule back, or remove refused_by where the preset may run now" if decision.not_refused_by else ""
    mark = mark_of(decision.outcome)
    mark = replace(mark, word=_WORDS.get(decision.outcome, mark.word))
    return Diagnostic(decision.preset, mark, "fp8_policy", decision.says, tuple(fields), step)
