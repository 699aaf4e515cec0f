"""Whether the policy of low precision lets presets through: rules in, every refusal with its reason out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Literal

from .. import TOOL
from ..catalog.bridge import read_catalog
from ..catalog.fp8 import (
    HistoryRule,
    LowParts,
    MultiplesRule,
    PartsRule,
    PolicyRules,
    Preset,
    Rule,
    TargetRule,
    TogetherRule,
    Waiver,
    ZonesRule,
    read_fp8_policy,
)
from ..errors import Exit, NothingSelected, WrongArguments, exit_for
from ..evidence.values import Frozen
from .decision import JudgedWaiver, WaiverState


class PresetOutcome(StrEnum):
    """What becomes of a preset."""

    ALLOWED = "allowed"  # no rule refuses anything of it
    WAIVED = "waived"  # a waiver holds off whatever refuses it
    ROLLED_BACK = "rolled-back"  # refused by the rules that must refuse it
    REFUSED = "refused"  # refused, and it is meant to run
    NOT_REFUSED = "not-refused"  # a rule that must refuse it does not

    @property
    def is_good(self) -> bool:
        """Whether the policy and the preset agree."""
        return self not in (PresetOutcome.REFUSED, PresetOutcome.NOT_REFUSED)


class PresetWaiver(JudgedWaiver):
    """A waiver of a rule for a preset; `holds`: whether it holds off a refusal today."""

    preset: str
    holds: bool


class PresetRefusal(Frozen):
    """What one rule refuses of a preset.

    Attributes:
        rule: its id.
        refuses: what it refuses, for a person.
        found: what the preset has of it.
        reason: why that is refused.
        source: where that is known from; empty where it is the project's own experience.
        next: what to do.
        waiver: of this rule and preset, holding or expired; the one that holds longest.
    """

    rule: str
    refuses: str
    found: str
    reason: str
    source: str
    next: str
    waiver: PresetWaiver | None = None

    @property
    def waived_until(self) -> date | None:
        """The last day on which this refusal stops nobody; None where it stands."""
        return self.waiver.expires if self.waiver is not None and self.waiver.holds else None


class PresetDecision(Frozen):
    """What the policy says of a preset on a day.

    Attributes:
        says: what it is, for a person.
        targets: that it is for.
        low: what of it is to run in low precision.
        bf16_first, bf16_last: how many of the first and of the last of its `layers` stay in BF16.
        outcome: what becomes of it.
        refusals: all of them, the waived ones too.
        not_refused_by: rules that must refuse it, and refuse nothing of it.
    """

    preset: str
    today: date
    says: str
    targets: tuple[str, ...]
    low: tuple[LowParts, ...]
    layers: int
    bf16_first: int
    bf16_last: int
    outcome: PresetOutcome
    refusals: tuple[PresetRefusal, ...]
    not_refused_by: tuple[str, ...] = ()


class PolicyResult(Frozen):
    """What the policy says of presets on a day.

    Attributes:
        rules: how many there are.
        presets: each with what becomes of it.
        waivers: of these presets, those too that do nothing.
    """

    schema_id: Literal["megacpp-validate/fp8-policy/1"] = "megacpp-validate/fp8-policy/1"
    tool: str
    today: date
    rules: int
    presets: tuple[PresetDecision, ...]
    waivers: tuple[PresetWaiver, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether policy and presets agree in all of them."""
        return all(decision.outcome.is_good for decision in self.presets)

    @property
    def exit(self) -> Exit:
        """Closed where policy and presets disagree."""
        return exit_for(breaks=not self.holds)


def decide_policy(matrix: Path | None, today: date | None = None, presets: Sequence[str] | None = None) -> PolicyResult:
    """What the policy says of presets.

    Args:
        matrix: its folder; the project's own without it.
        today: the day on which waivers are held to their expiry; today, UTC, without it.
        presets: those to look at; all without it.

    Raises:
        MatrixInvalid: with every fault of the files.
        WrongArguments: a preset has no row.
        NothingSelected: no preset is named.
    """
    if presets is not None and not presets:
        raise NothingSelected("no preset is selected. Next step: name one, or leave --preset out for all.")
    today = today or datetime.now(UTC).date()
    policy = read_fp8_policy(read_catalog(matrix).targets, matrix)
    known = {preset.id: preset for preset in policy.presets}
    if unknown := [name for name in presets or () if name not in known]:
        raise WrongArguments(
            f"there is no preset {', '.join(map(repr, unknown))}. Next step: choose from {', '.join(known)}, or add a "
            "row to fp8_presets.toml."
        )
    chosen = [known[name] for name in dict.fromkeys(known if presets is None else presets)]
    decisions = tuple(decide_preset(preset, policy.rules, policy.waivers, today) for preset in chosen)
    waivers = list_waivers(policy.waivers, decisions, today)
    return PolicyResult(tool=TOOL, today=today, rules=len(policy.rules.rules), presets=decisions, waivers=waivers)


def decide_preset(preset: Preset, rules: PolicyRules, waivers: Sequence[Waiver], today: date) -> PresetDecision:
    """What the rules refuse of a preset, and what becomes of it.

    A waiver hides nothing: a refusal that it holds off is among the others. One that has expired, or that is of a rule
    that cannot be waived, holds nothing off.
    """
    refusals = []
    for rule in rules.rules:
        own = [waiver for waiver in waivers if (waiver.rule, waiver.preset) == (rule.id, preset.id)]
        last = max(own, key=lambda waiver: waiver.expires, default=None)
        waiver = _judge_waiver(last, today, waivable=rule.waivable) if last else None
        words = {name: getattr(rule, name) for name in ("refuses", "reason", "source", "next")}
        found = _find(rule, preset, rules)
        refusals += [PresetRefusal(rule=rule.id, found=one, waiver=waiver, **words) for one in found]
    missed = tuple(rule for rule in preset.refused_by if rule not in {refusal.rule for refusal in refusals})
    if missed:  # reported even where another rule refuses the preset
        outcome = PresetOutcome.NOT_REFUSED
    elif not refusals:
        outcome = PresetOutcome.ALLOWED
    elif all(refusal.waived_until is not None for refusal in refusals):
        outcome = PresetOutcome.WAIVED
    else:
        outcome = PresetOutcome.ROLLED_BACK if preset.refused_by else PresetOutcome.REFUSED
    return PresetDecision(
        preset=preset.id, today=today, says=preset.says, targets=tuple(preset.targets), low=tuple(preset.low),
        layers=len(preset.pattern), bf16_first=preset.bf16_first, bf16_last=preset.bf16_last,
        outcome=outcome, refusals=tuple(refusals), not_refused_by=missed,
    )  # fmt: skip


def list_waivers(
    waivers: Sequence[Waiver], decisions: Sequence[PresetDecision], today: date
) -> tuple[PresetWaiver, ...]:
    """What each waiver of these presets does."""
    needed = {(refusal.rule, decision.preset) for decision in decisions for refusal in decision.refusals}
    known = {decision.preset for decision in decisions}
    return tuple(
        _judge_waiver(one, today, needed=(one.rule, one.preset) in needed) for one in waivers if one.preset in known
    )


def _judge_waiver(waiver: Waiver, today: date, *, waivable: bool = True, needed: bool = True) -> PresetWaiver:
    state = WaiverState.HOLDS if waiver.expires >= today else WaiverState.EXPIRED
    holds = waivable and state is WaiverState.HOLDS
    return PresetWaiver(**waiver.model_dump(), state=state if needed else WaiverState.NOT_NEEDED, holds=holds)


def _find(rule: Rule, preset: Preset, rules: PolicyRules) -> Iterator[str]:
    """What a preset has of what a rule refuses."""
    match rule:
        case ZonesRule():
            if preset.low and (preset.bf16_first < rule.first or preset.bf16_last < rule.last):
                yield (
                    f"of {len(preset.pattern)} layers the first {preset.bf16_first} and the last {preset.bf16_last} "
                    f"stay in BF16; at least {rule.first} and {rule.last} are required"
                )
        case PartsRule():
            for low in preset.low:
                yield from (f"{part} runs in {low.recipe}" for part in low.parts if part in rule.parts)
        case TogetherRule():
            missing = [owner for owner in rule.owners if not preset.owners.get(owner, "").strip()]
            if preset.low and preset.graphs and preset.recompute == "selective" and missing:
                yield f"low precision, graphs and selective recompute, and no owner is named for {', '.join(missing)}"
        case HistoryRule():
            if preset.amax_history < rule.least and any(low.recipe == "delayed" for low in preset.low):
                yield f"amax_history is {preset.amax_history}; at least {rule.least} is required"
        case TargetRule():
            yield from _find_targets(preset, rules)
        case MultiplesRule():
            yield from _find_odd_sizes(preset, rules)


def _find_targets(preset: Preset, rules: PolicyRules) -> Iterator[str]:
    for target, low in product(preset.targets, preset.low):
        have = rules.recipes.get(target, ())
        if low.recipe not in have:
            others = [name for name, recipes in rules.recipes.items() if low.recipe in recipes]
            yield (
                f"{', '.join(low.parts)}: {target} has no {low.recipe} (it has {', '.join(have) or 'none'}); "
                f"targets that have it: {', '.join(others) or 'none'}"
            )


def _find_odd_sizes(preset: Preset, rules: PolicyRules) -> Iterator[str]:
    for low, row in product(preset.low, rules.multiples):
        sizes = [("width", width, row.widths) for width in low.widths]
        for what, size, step in (*sizes, ("tokens", preset.tokens, row.tokens)):
            if low.recipe == row.recipe and size % step:
                text = f"{what} {size}; {low.recipe} takes multiples of {step} ({row.source})"
                yield f"{', '.join(low.parts)}: {text}"
