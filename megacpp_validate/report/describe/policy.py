"""What the policy of low precision says of presets, in words."""

from __future__ import annotations

from typing import Final

from megacpp_validate.text import count

from ...gate.decision import WaiverState
from ...gate.fp8_policy import PolicyResult, PresetDecision, PresetOutcome, PresetRefusal
from ..document import Block, Content, Diagnostic, Document, Table
from ..marks import bad, good, quiet
from ..marks import risk as risk_mark

MARKS: Final = {
    PresetOutcome.ALLOWED: good("allowed"),
    PresetOutcome.WAIVED: risk_mark("allowed by waiver"),
    PresetOutcome.ROLLED_BACK: quiet("refused, as it must be"),
    PresetOutcome.REFUSED: bad("refused"),
    PresetOutcome.NOT_REFUSED: bad("not refused, and it must be"),
}
_WAIVERS: Final = {
    WaiverState.HOLDS: risk_mark("holds"),
    WaiverState.EXPIRED: bad("expired"),
    WaiverState.NOT_NEEDED: quiet("not needed"),
}


def describe_policy(result: PolicyResult) -> Document:
    """The answer, each preset with every refusal and its reason, and the waivers."""
    named = {mark: [one.preset for one in result.presets if one.outcome is outcome] for outcome, mark in MARKS.items()}
    words = [f"{mark.word}: {', '.join(names)}" for mark, names in named.items() if names]
    cases = tuple(_describe_preset(one) for one in result.presets)
    blocks: list[Block] = list(cases)
    if result.waivers:
        rows = tuple(
            (one.rule, one.preset, one.owner, _WAIVERS[one.state], str(one.expires), f"{one.reason} ({one.link})")
            for one in result.waivers
        )
        blocks.append(Table(("rule", "preset", "owner", "waiver", "until", "reason"), rows))
    return Document(
        f"Low-precision policy on {result.today}",
        f"{count(result.rules, 'rule')}. {'; '.join(words) or 'No preset was selected'}.",
        good("agrees") if result.holds else bad("disagrees"),
        tuple(blocks),
        cases,
    )


def _describe_preset(decision: PresetDecision) -> Diagnostic:
    recipes: dict[str, list[str]] = {}
    for low in decision.low:
        recipes.setdefault(low.recipe, []).extend(low.parts)
    runs = "; ".join(f"{recipe}: {', '.join(parts)}" for recipe, parts in recipes.items()) or "everything in BF16"
    zones = f"first {decision.bf16_first} and last {decision.bf16_last} of {decision.layers} layers in BF16"
    fields: list[tuple[str, Content]] = [("runs", runs), ("zones", zones), ("targets", ", ".join(decision.targets))]
    for rule in decision.not_refused_by:
        text = f"the rule {rule} must refuse this preset and refuses nothing of it. Likely cause: the rule, or a part "
        text += "that it names, was taken out of fp8_policy.toml"
        fields.append(("not refused", text))
    for rule, group in _group(decision).items():
        fields += _list_fields(rule, group)
    step = "put the rule back, or remove refused_by where the preset may run now" if decision.not_refused_by else ""
    return Diagnostic(
        decision.preset, MARKS[decision.outcome], group="fp8_policy", message=decision.says, fields=tuple(fields),
        help=step,
    )  # fmt: skip


def _group(decision: PresetDecision) -> dict[str, list[PresetRefusal]]:
    """Refusals by rule: its reason is shown once."""
    found: dict[str, list[PresetRefusal]] = {}
    for refusal in decision.refusals:
        found.setdefault(refusal.rule, []).append(refusal)
    return found


def _list_fields(rule: str, group: list[PresetRefusal]) -> list[tuple[str, Content]]:
    first = group[0]
    until = first.waived_until
    seen = "; ".join(one.found for one in group)
    fields: list[tuple[str, Content]] = [
        (f"waived until {until}" if until else "refused", f"{first.refuses} [{rule}]: {seen}"),
        ("why", f"{first.reason}{f' ({first.source})' if first.source else ''}"),
    ]
    if (waiver := first.waiver) is not None:
        state = f"holds until {waiver.expires}" if waiver.holds else f"expired on {waiver.expires}"
        fields.append(("waiver", f"{state}, owner {waiver.owner}: {waiver.reason} ({waiver.link})"))
    return [*fields, ("next", first.next)]
