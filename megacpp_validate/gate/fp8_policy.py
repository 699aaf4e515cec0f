"""Whether the policy of low precision lets a preset through: rules in, every refusal with its reason out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date

from ..catalog_fp8 import (
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
from ..evidence.preset_decision import PresetDecision, PresetRefusal, WaiverSeen


def decide_preset(preset: Preset, rules: PolicyRules, waivers: Sequence[Waiver], today: date) -> PresetDecision:
    """What the rules refuse of a preset.

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
    return PresetDecision(preset.id, today, refusals)


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
