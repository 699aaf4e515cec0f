"""What the release gate decided, as the pages of a site say it."""

from __future__ import annotations

from collections.abc import Sequence

from megacpp_validate.evidence.release_gate import CellVerdict, GateDecision

from .marks import Mark
from .summaries import count

OPEN = Mark("✓", "-", "open", "good")
CLOSED = Mark("✗", "X", "closed", "bad")
LACKING = Mark("○", "?", "closed, evidence missing", "risk")


def mark_gate(gate: GateDecision, foreign: Sequence[GateDecision] = ()) -> Mark:
    """How a decision looks: closed for want of evidence is another thing than closed by a breakage.

    Args:
        gate: the decision.
        foreign: those that were made of other receipts than are shown: open for these is open for nothing here.
    """
    mark = OPEN if gate.open else LACKING if gate.exit_code == 4 else CLOSED
    if gate in foreign:
        word = f"{mark.word}, of other receipts"
        return Mark("▲", "!", word, "risk") if gate.open else mark._replace(word=word)
    return mark


def mark_verdict_of(row: CellVerdict) -> Mark:
    """How the verdict on one receipt looks."""
    if row.accepted and row.waived_by:
        return Mark("▲", "!", "waived", "risk")
    if row.accepted:
        return Mark("✓", "-", "accepted", "good")
    if not row.closes:
        return Mark("·", ".", "not counted", "quiet")
    if row.outcome is None:
        return Mark("○", "?", "missing", "risk")
    return Mark("✗", "X", "rejected", "bad")


def say_gate(gate: GateDecision) -> str:
    """The decision in one sentence."""
    held = sum(row.accepted for row in gate.required)
    said = f"{held} of {count(len(gate.required), 'required cell')} accepted"
    if gate.open:
        waived = sum(bool(row.waived_by) for row in gate.required)
        return f"Open for {gate.release}: {said}{f', {waived} by waiver' if waived else ''}."
    who = ", ".join(f"{one.module} ({one.component or one.cause.value})" for one in gate.culprits)
    blamed = f"; to blame: {who}" if who else ""
    lost = f"; no evidence on {count(len(gate.missing), 'cell')}" if gate.missing else ""
    return f"Closed for {gate.release}: {said}{blamed}{lost}."


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
        ("baseline", gate.baseline),
    ]
    return [(name, value) for name, value in told if value]


def find_others(gate: GateDecision) -> tuple[CellVerdict, ...]:
    """Receipts that are not required, those that close the gate first."""
    return tuple(sorted((row for row in gate.cells if not row.required), key=lambda row: not row.closes))
