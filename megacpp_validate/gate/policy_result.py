"""Whether presets of low precision are let through, as typed values: every refusal with its reason, waived or not."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from typing import Literal

from ..evidence.values import Frozen
from .decision import WaiverState


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


@dataclass(frozen=True)
class WaiverSeen:
    """A waiver of the rule that refuses a preset.

    Attributes:
        owner: who answers for it.
        expires: the last day on which it holds.
        holds: whether it does today.
    """

    owner: str
    reason: str
    link: str
    expires: date
    holds: bool


@dataclass(frozen=True)
class PresetRefusal:
    """What one rule refuses of a preset.

    Attributes:
        rule: its id.
        refuses: what it refuses, for a person.
        found: what the preset has of it.
        reason: why that is refused.
        source: where that is known from; empty where it is the project's own experience.
        next: what to do.
        waiver: of this rule and preset, holding or expired.
    """

    rule: str
    refuses: str
    found: str
    reason: str
    source: str
    next: str
    waiver: WaiverSeen | None = None

    @property
    def waived_until(self) -> date | None:
        """The last day on which this refusal stops nobody; None where it stands."""
        return self.waiver.expires if self.waiver is not None and self.waiver.holds else None


@dataclass(frozen=True)
class LowSeen:
    """Parts of a preset that are to run in a recipe."""

    parts: tuple[str, ...]
    recipe: str


@dataclass(frozen=True)
class PresetDecision:
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
    low: tuple[LowSeen, ...]
    layers: int
    bf16_first: int
    bf16_last: int
    outcome: PresetOutcome
    refusals: tuple[PresetRefusal, ...]
    not_refused_by: tuple[str, ...] = ()

    @property
    def standing(self) -> tuple[PresetRefusal, ...]:
        """The refusals that no waiver holds off."""
        return tuple(refusal for refusal in self.refusals if refusal.waived_until is None)

    @property
    def is_allowed(self) -> bool:
        """Whether the preset may run."""
        return not self.standing


@dataclass(frozen=True)
class WaiverStanding:
    """A waiver, and what it does today.

    Attributes:
        rule, preset: what it holds off, and for whom.
        owner: who answers for it.
        expires: the last day on which it can hold.
    """

    rule: str
    preset: str
    owner: str
    reason: str
    link: str
    expires: date
    state: WaiverState


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
    waivers: tuple[WaiverStanding, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether policy and presets agree in all of them."""
        return all(decision.outcome.is_good for decision in self.presets)
