"""What the policy of low precision says of a preset, in words."""

from __future__ import annotations

from collections.abc import Iterator

from ..evidence.preset_decision import PresetDecision, PresetRefusal


def preset_lines(decision: PresetDecision) -> list[str]:
    """The verdict, and each refusal with its reason, the waived ones too."""
    return [_verdict(decision), *(line for refusal in decision.refusals for line in _refusal_lines(refusal))]


def _verdict(decision: PresetDecision) -> str:
    standing, waived = len(decision.standing), len(decision.refusals) - len(decision.standing)
    said = f"refused, for {standing} reason{'s' if standing > 1 else ''}" if standing else "allowed"
    if waived:
        said += f"; {waived} waived"
    return f"preset {decision.preset}: {said}"


def _refusal_lines(refusal: PresetRefusal) -> Iterator[str]:
    until = refusal.waived_until
    yield f"  {f'waived until {until}' if until else 'refused'}: {refusal.refuses} [{refusal.rule}]: {refusal.found}"
    yield f"    why: {refusal.reason}{f' ({refusal.source})' if refusal.source else ''}"
    if refusal.waiver is not None:
        waiver = refusal.waiver
        state = "holds" if waiver.holds else "does not hold"
        yield f"    the waiver of {waiver.owner} (until {waiver.expires}) {state}: {waiver.reason} ({waiver.link})"
    yield f"    next: {refusal.next}"
