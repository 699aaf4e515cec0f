"""What the policy of low precision says of presets, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, assert_never

from ...gate.decision import WaiverState
from ...gate.fp8_policy import PolicyResult, PresetDecision, PresetOutcome, PresetRefusal, WaiverStatus
from ..marks import Mark
from ..summaries import count

_MARKS: Final = {
    PresetOutcome.ALLOWED: Mark("✓", "-", "allowed", "good"),
    PresetOutcome.WAIVED: Mark("▲", "!", "allowed by waiver", "risk"),
    PresetOutcome.ROLLED_BACK: Mark("·", ".", "refused, as it must be", "quiet"),
    PresetOutcome.REFUSED: Mark("✗", "X", "refused", "bad"),
    PresetOutcome.NOT_REFUSED: Mark("✗", "X", "not refused, and it must be", "bad"),
}
_WAIVERS: Final = {
    WaiverState.HOLDS: Mark("▲", "!", "holds", "risk"),
    WaiverState.EXPIRED: Mark("✗", "X", "expired", "bad"),
    WaiverState.NOT_NEEDED: Mark("·", ".", "not needed", "quiet"),
}


def mark_preset(decision: PresetDecision) -> Mark:
    """How what becomes of a preset looks."""
    return _MARKS[decision.outcome]


def mark_waiver(waiver: WaiverStatus) -> Mark:
    """How what a waiver does looks."""
    return _WAIVERS[waiver.state]


def summarize_policy(result: PolicyResult) -> str:
    """The answer in a sentence, what is wrong first."""
    by_outcome = {
        outcome: [decision.preset for decision in result.presets if decision.outcome is outcome]
        for outcome in PresetOutcome
    }
    said = {
        "The policy no longer refuses": by_outcome[PresetOutcome.NOT_REFUSED],
        "May not run:": by_outcome[PresetOutcome.REFUSED],
        "Allowed:": by_outcome[PresetOutcome.ALLOWED],
        "Allowed by waiver:": by_outcome[PresetOutcome.WAIVED],
        "Rolled back, and refused:": by_outcome[PresetOutcome.ROLLED_BACK],
    }
    sentences = [f"{what} {', '.join(names)}." for what, names in said.items() if names]
    return " ".join(sentences) or "No preset was looked at."


def say_what_runs(decision: PresetDecision) -> str:
    """What the preset asks for: recipes, their parts, and what stays in BF16."""
    if not decision.low:
        return f"everything stays in BF16, on {', '.join(decision.targets)}"
    by_recipe: dict[str, list[str]] = {}
    for low in decision.low:
        by_recipe.setdefault(low.recipe, []).extend(low.parts)
    parts = "; ".join(f"{recipe}: {', '.join(names)}" for recipe, names in by_recipe.items())
    ends = f"the first {decision.bf16_first} and the last {decision.bf16_last} of {decision.layers} layers"
    if not decision.bf16_first and not decision.bf16_last:
        ends = "no whole layer"
    return f"{parts}. BF16: every other part, and {ends}. On {', '.join(decision.targets)}"


def find_faults(decision: PresetDecision) -> list[str]:
    """What is wrong that no refusal tells: rules that must refuse it, and do not."""
    return [
        f"the rule {rule} must refuse this preset and refuses nothing of it. Likely cause: the rule, or a part that it "
        "names, was taken out of fp8_policy.toml. Next step: put it back, or take refused_by out where the preset may "
        "run now, and say why in the commit"
        for rule in decision.not_refused_by
    ]


def group_refusals(decision: PresetDecision) -> list[tuple[PresetRefusal, str]]:
    """A refusal of each rule, and all that the rule refuses in one line: its reason is told once."""
    found: dict[str, list[PresetRefusal]] = {}
    for refusal in decision.refusals:
        found.setdefault(refusal.rule, []).append(refusal)
    return [(group[0], _say_refused(group)) for group in found.values()]


def _say_refused(group: Sequence[PresetRefusal]) -> str:
    return f"{group[0].refuses} [{group[0].rule}]: {'; '.join(refusal.found for refusal in group)}"


def say_why(refusal: PresetRefusal) -> str:
    """Why a rule refuses it, and where that is known from."""
    return f"{refusal.reason}{f' ({refusal.source})' if refusal.source else ''}"


def say_waiver(refusal: PresetRefusal) -> str:
    """The waiver of a refusal; empty where there is none."""
    waiver = refusal.waiver
    if waiver is None:
        return ""
    if waiver.holds:
        state = f"lets it through until {waiver.expires}"
    else:
        state = f"expired on {waiver.expires} and lets nothing through"
    return f"of {waiver.owner}, {state}: {waiver.reason} ({waiver.link})"


def say_waiver_row(waiver: WaiverStatus) -> str:
    """A waiver by itself: of what, until when, and by whom."""
    of = f"{waiver.rule} for {waiver.preset}, of {waiver.owner}"
    match waiver.state:
        case WaiverState.HOLDS:
            return f"{of}: holds until {waiver.expires}"
        case WaiverState.EXPIRED:
            return f"{of}: expired on {waiver.expires}. Next step: mend the preset, or renew the row with a reason"
        case WaiverState.NOT_NEEDED:
            return f"{of}, until {waiver.expires}: its rule refuses nothing of the preset. Next step: remove the row"
        case _:
            assert_never(waiver.state)


def preset_lines(decision: PresetDecision) -> list[str]:
    """The verdict, and each refusal with its reason, the waived ones too; for a message or a log."""
    return [
        _verdict(decision),
        *(f"  {fault}" for fault in find_faults(decision)),
        *(line for refusal, said in group_refusals(decision) for line in _refusal_lines(refusal, said)),
    ]


def _verdict(decision: PresetDecision) -> str:
    standing = len({refusal.rule for refusal in decision.standing})
    waived = len({refusal.rule for refusal in decision.refusals}) - standing
    said = f"refused, for {count(standing, 'reason')}" if standing else "allowed"
    if waived:
        said += f"; {waived} waived"
    return f"preset {decision.preset}: {said}"


def _refusal_lines(refusal: PresetRefusal, said: str) -> Iterator[str]:
    until = refusal.waived_until
    yield f"  {f'waived until {until}' if until else 'refused'}: {said}"
    yield f"    why: {say_why(refusal)}"
    if refusal.waiver is not None:
        yield f"    waiver: {say_waiver(refusal)}"
    yield f"    next: {refusal.next}"
