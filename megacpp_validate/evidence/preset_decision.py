"""Whether a preset of low precision is let through, as typed values: every refusal with its reason, waived or not."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date


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
class PresetDecision:
    """What the policy says of a preset on a day.

    Attributes:
        refusals: all of them, the waived ones too.
    """

    preset: str
    today: date
    refusals: tuple[PresetRefusal, ...]

    @property
    def standing(self) -> tuple[PresetRefusal, ...]:
        """The refusals that no waiver holds off."""
        return tuple(refusal for refusal in self.refusals if refusal.waived_until is None)

    @property
    def is_allowed(self) -> bool:
        """Whether the preset may run."""
        return not self.standing
