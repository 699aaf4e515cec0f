"""What the pages of a site say of a release gate beyond what every report says of it (`gate_words`)."""

from __future__ import annotations

from collections.abc import Sequence

from megacpp_validate.gate.decision import CellVerdict, GateDecision

from ..marks import Mark
from ..words.gate import mark_gate


def mark_shown_gate(gate: GateDecision, foreign: Sequence[GateDecision] = ()) -> Mark:
    """How a decision looks beside the receipts that are shown.

    Args:
        gate: the decision.
        foreign: those that were made of other receipts than are shown: open for these is open for nothing here.
    """
    mark = mark_gate(gate)
    if gate in foreign:
        word = f"{mark.word}, of other receipts"
        return Mark("▲", "!", word, "risk") if gate.open else mark._replace(word=word)
    return mark


def identity_of(gate: GateDecision) -> list[tuple[str, str]]:
    """What the decision is bound to."""
    told = [
        ("judged at", gate.judged_at),
        ("receipts", gate.receipts_sha256),
        ("rules", gate.rules_sha256),
        ("commit", gate.commit),
        ("image digest", gate.image_digest),
        ("lock hash", gate.lock_hash),
        ("signed by", gate.signed_by),
        ("compared with", gate.baseline),
    ]
    return [(name, value) for name, value in told if value]


def find_others(gate: GateDecision) -> tuple[CellVerdict, ...]:
    """Receipts that are not required, those that close the gate first."""
    return tuple(sorted((row for row in gate.cells if not row.required), key=lambda row: not row.closes))
