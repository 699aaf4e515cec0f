"""Whether the policy of low precision lets presets through: rules in, every refusal with its reason out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date

from ..catalog.fp8 import (
    HistoryRule,
    LowParts,
    Multiple,
    MultiplesRule,
    PartsRule,
    PolicyRules,
    Preset,
    Rule,
    TargetRule,
    TogetherRule,
    Waiver,
    ZonesRule,
)
from .decision import WaiverState
from .policy_result import LowSeen, PresetDecision, PresetOutcome, PresetRefusal, WaiverSeen, WaiverStanding


def decide_preset(preset: Preset, rules: PolicyRules, waivers: Sequence[Waiver], today: date) -> PresetDecision:
    """What the rules refuse of a preset, and what becomes of it.

    A waiver hides nothing: a refusal that it holds off is among the others. One that has expired, or that is of a rule
    that cannot be waived, holds nothing off.
    """
    refusals = tuple(
        PresetRefusal(
            rule.id, rule.refuses, found, rule.reason, rule.source, rule.next, _waiver(rule, preset, waivers, today)
        )
        for rule in rules.rules
        for found in _find(rule, preset, rules)
    )
    refused_by = {refusal.rule for refusal in refusals}
    missed = tuple(rule for rule in preset.refused_by if rule not in refused_by)
    return PresetDecision(
        preset=preset.id,
        today=today,
        says=preset.says,
        targets=tuple(preset.targets),
        low=tuple(LowSeen(tuple(low.parts), low.recipe) for low in preset.low),
        layers=len(preset.pattern),
        bf16_first=preset.bf16_first,
        bf16_last=preset.bf16_last,
        outcome=_decide_outcome(preset, refusals, missed),
        refusals=refusals,
        not_refused_by=missed,
    )


def see_waivers(
    waivers: Sequence[Waiver], decisions: Sequence[PresetDecision], today: date
) -> tuple[WaiverStanding, ...]:
    """What each waiver of these presets does."""
    needed = {(refusal.rule, decision.preset) for decision in decisions for refusal in decision.refusals}
    known = {decision.preset for decision in decisions}
    return tuple(
        WaiverStanding(
            waiver.rule,
            waiver.preset,
            waiver.owner,
            waiver.reason,
            waiver.link,
            waiver.expires,
            _judge_waiver(waiver, today) if (waiver.rule, waiver.preset) in needed else WaiverState.NOT_NEEDED,
        )
        for waiver in waivers
        if waiver.preset in known
    )


def _judge_waiver(waiver: Waiver, today: date) -> WaiverState:
    return WaiverState.HOLDS if waiver.expires >= today else WaiverState.EXPIRED


def _decide_outcome(preset: Preset, refusals: Sequence[PresetRefusal], missed: Sequence[str]) -> PresetOutcome:
    """A rule that must refuse a preset and does not is told even where another one refuses it."""
    if missed:
        return PresetOutcome.NOT_REFUSED
    if not refusals:
        return PresetOutcome.ALLOWED
    if all(refusal.waived_until is not None for refusal in refusals):
        return PresetOutcome.WAIVED
    return PresetOutcome.ROLLED_BACK if preset.refused_by else PresetOutcome.REFUSED


def _waiver(rule: Rule, preset: Preset, waivers: Sequence[Waiver], today: date) -> WaiverSeen | None:
    """The one of this rule and preset that holds longest."""
    own = [waiver for waiver in waivers if (waiver.rule, waiver.preset) == (rule.id, preset.id)]
    if not own:
        return None
    last = max(own, key=lambda waiver: waiver.expires)
    return WaiverSeen(last.owner, last.reason, last.link, last.expires, rule.waivable and last.expires >= today)


def _find(rule: Rule, preset: Preset, rules: PolicyRules) -> Iterator[str]:
    """What a preset has of what a rule refuses."""
    match rule:
        case ZonesRule():
            yield from _find_zones(rule, preset)
        case PartsRule():
            yield from (
                f"{part} runs in {low.recipe}" for low in preset.low for part in low.parts if part in rule.parts
            )
        case TogetherRule():
            yield from _find_together(rule, preset)
        case HistoryRule():
            if preset.amax_history < rule.least and any(low.recipe == "delayed" for low in preset.low):
                yield f"amax_history is {preset.amax_history}; at least {rule.least} is wanted"
        case TargetRule():
            yield from _find_targets(preset, rules)
        case MultiplesRule():
            of = {row.recipe: row for row in rules.multiples}
            yield from (
                found for low in preset.low if low.recipe in of for found in _find_odd(low, preset, of[low.recipe])
            )


def _find_zones(rule: ZonesRule, preset: Preset) -> Iterator[str]:
    if preset.low and (preset.bf16_first < rule.first or preset.bf16_last < rule.last):
        yield (
            f"of {len(preset.pattern)} layers the first {preset.bf16_first} and the last {preset.bf16_last} stay in "
            f"BF16; at least {rule.first} and {rule.last} are wanted"
        )


def _find_together(rule: TogetherRule, preset: Preset) -> Iterator[str]:
    missing = [owner for owner in rule.owners if not preset.owners.get(owner, "").strip()]
    if preset.low and preset.graphs and preset.recompute == "selective" and missing:
        yield f"low precision, graphs and selective recompute, and nobody is named for {', '.join(missing)}"


def _find_targets(preset: Preset, rules: PolicyRules) -> Iterator[str]:
    for target in preset.targets:
        have = rules.recipes.get(target, ())
        for low in preset.low:
            if low.recipe not in have:
                others = [name for name, recipes in rules.recipes.items() if low.recipe in recipes]
                yield (
                    f"{', '.join(low.parts)}: {target} has no {low.recipe} (it has {', '.join(have) or 'none'}); "
                    f"{', '.join(others) or 'no target'} {'have' if len(others) > 1 else 'has'} it"
                )


def _find_odd(low: LowParts, preset: Preset, row: Multiple) -> Iterator[str]:
    parts = ", ".join(low.parts)
    odd = [str(width) for width in low.widths if width % row.widths]
    if odd:
        yield f"{parts}: width {', '.join(odd)}; {low.recipe} takes multiples of {row.widths} ({row.source})"
    if preset.tokens % row.tokens:
        yield f"{parts}: {preset.tokens} tokens; {low.recipe} takes multiples of {row.tokens} ({row.source})"
