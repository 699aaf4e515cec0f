"""What the policy of low precision says of presets, as a page."""

from __future__ import annotations

from ...gate.fp8_policy import PolicyResult, PresetOutcome
from ..words import presets as preset_words
from .pages import render_page


def render_policy_html(result: PolicyResult) -> str:
    """Every preset with what it may and may not, and every waiver."""
    waived = any(decision.outcome is PresetOutcome.WAIVED for decision in result.presets)
    tone = "bad" if not result.holds else "risk" if waived or not result.presets else "good"
    return render_page("policy.html.j2", result=result, words=preset_words, tone=tone)
