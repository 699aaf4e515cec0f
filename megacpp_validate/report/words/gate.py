"""What a release gate decided, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, assert_never

from megacpp_validate.gate.decision import (
    CellVerdict,
    GateDecision,
    GateWaiver,
)

from ...catalog.gate import BREAKAGES, GateRule
from ...diagnosis.culprits import Culprit
from ...gate.decision import WaiverState
from ..marks import Mark
from ..summaries import count, first_sentence

_WAIVERS: Final = {
    WaiverState.HOLDS: Mark("▲", "!", "holds", "risk"),
    WaiverState.EXPIRED: Mark("✗", "X", "expired", "bad"),
    WaiverState.NOT_NEEDED: Mark("·", ".", "not needed", "quiet"),
}
# What breaks one of these is of something else than is judged, or too old: what it shows is no breakage of this.
OF_ANOTHER: Final = frozenset({GateRule.STACK, GateRule.TARGET, GateRule.AGE, GateRule.SCHEMA})
_LACKING: Final = 4  # the gate's exit code where evidence is missing and nothing is broken
_MOST_NAMED: Final = 5
_SHORT: Final = 12


def mark_gate(decision: GateDecision) -> Mark:
    """How the answer looks: closed for want of evidence is another thing than closed by a breakage."""
    if decision.open:
        return Mark("✓", "-", "open", "good")
    lacking = decision.exit_code == _LACKING
    return Mark("○", "?", "closed, evidence missing", "risk") if lacking else Mark("✗", "X", "closed", "bad")


def mark_cell_verdict(verdict: CellVerdict) -> Mark:
    """How a verdict looks."""
    if verdict.accepted:
        return Mark("▲", "!", "waived", "risk") if verdict.waived_by else Mark("✓", "-", "accepted", "good")
    if not verdict.closes:
        return Mark("▲", "!", "waived", "risk") if verdict.waived_by else Mark("·", ".", "does not count", "quiet")
    return Mark("✗", "X", "rejected", "bad") if is_rejected(verdict) else Mark("○", "?", "no evidence", "bad")


def is_rejected(verdict: CellVerdict) -> bool:
    """Whether a cell is closed by a breakage, whatever evidence it lacks beside it.

    A waiver holds off one of its breakages at least, and a verdict does not say which: one more is one that stands.
    """
    breaking = {rule for rule in verdict.rules if rule in BREAKAGES}
    return verdict.closes and len(breaking) > bool(verdict.waived_by) and not OF_ANOTHER & {*verdict.rules}


def mark_gate_waiver(waiver: GateWaiver) -> Mark:
    """How what a waiver does looks."""
    if waiver.in_vain:
        return Mark("✗", "X", "holds nothing off", "bad")
    return _WAIVERS[waiver.state]


def say_gate(decision: GateDecision) -> str:
    """What was judged."""
    return f"{decision.release} of {decision.stack} on {decision.target}"


def summarize_gate(decision: GateDecision) -> str:
    """The answer in a sentence or two: who closes it, then what is missing."""
    required = decision.required
    if decision.open:
        waived = [verdict.probe for verdict in required if verdict.waived_by]
        said = f"Open: {count(len(required), 'required cell')} accepted"
        return f"{said}, {', '.join(waived)} by waiver." if waived else f"{said}."
    said = "Closed"
    if decision.culprits:
        said += f" by {'; '.join(map(name_culprit, decision.culprits))}"
    rejected = {verdict.cell for verdict in required if is_rejected(verdict)}
    parts = [f"{len(rejected)} of {count(len(required), 'required cell')} rejected"] if rejected else []
    if missing := tuple(cell for cell in decision.missing if cell not in rejected):
        parts.append(f"no evidence of {_name(missing)}")
    if others := [verdict for verdict in decision.closing if not verdict.required]:
        parts.append(f"{count(len(others), 'other receipt')} in the way")
    return f"{said}: {'; '.join(parts)}."


def name_culprit(culprit: Culprit) -> str:
    """Module, component below Transformer Engine, class of cause."""
    inner = ", ".join(filter(None, [culprit.component, culprit.cause.value]))
    return f"{culprit.module} ({inner})"


def say_culprit_lines(culprit: Culprit) -> Iterator[tuple[str, str]]:
    """What was seen, what is red by it, what to do: label and text of each."""
    yield "seen", culprit.summary
    if culprit.cascades:
        yield "with it", ", ".join(culprit.cascades)
    yield "next", culprit.next_step


def say_why(verdict: CellVerdict, *, whole: bool = True) -> list[str]:
    """Every reason behind its rule; the first sentence of each, where not the whole is asked for."""
    return [
        f"{rule.value}: {reason if whole else first_sentence(reason)}"
        for rule, reason in zip(verdict.rules, verdict.reasons, strict=True)
    ]


def say_place(verdict: CellVerdict) -> str:
    """The receipt's run and cell; the cell alone where there is no receipt."""
    return verdict.cell if verdict.run in ("", ".") else f"{verdict.run}/{verdict.cell}"


def group_warnings(decision: GateDecision) -> dict[str, list[str]]:
    """Warning -> probes that have it, in the order of the cells."""
    found: dict[str, list[str]] = {}
    for verdict in decision.cells:
        for warning in verdict.warnings:
            found.setdefault(warning, []).append(verdict.probe)
    return found


def list_others(decision: GateDecision) -> list[CellVerdict]:
    """Receipts that are not required and close the gate."""
    return [verdict for verdict in decision.cells if verdict.closes and not verdict.required]


def say_not_counting(decision: GateDecision) -> list[str]:
    """How many receipts do not count, by rule."""
    quiet = [verdict for verdict in decision.cells if not verdict.closes and not verdict.required]
    numbers = Counter(verdict.rules[0] for verdict in quiet if verdict.rules)
    return [f"{numbers[rule]} {_NOT_COUNTING.get(rule, rule.value)}" for rule in GateRule if numbers[rule]]


_NOT_COUNTING: Final = {
    GateRule.UNREADABLE: "no receipts",
    GateRule.NAME: "under a name that is not theirs",
    GateRule.STACK: "of another stack",
    GateRule.TARGET: "of another target",
    GateRule.NOT_REQUIRED: "of cells that are not required",
    GateRule.COMMIT: "of another commit",
    GateRule.IMAGE: "of another image",
    GateRule.LOCK: "of another lock",
    GateRule.REPLAYED: "copies",
    GateRule.SUPERSEDED: "older than another of their cell",
    GateRule.ONLY_TIMED: "timed a second time only",
}


def say_gate_waiver(waiver: GateWaiver) -> str:
    """A waiver by itself: of what, until when, and by whom."""
    of = f"{waiver.rule.value} for {waiver.cell}, of {waiver.owner}"
    if waiver.in_vain:
        return f"{of}: holds nothing off: NaN, Inf and imports cannot be waived. Next step: mend the cell"
    match waiver.state:
        case WaiverState.HOLDS:
            return f"{of}: holds until {waiver.expires}: {waiver.reason} ({waiver.link})"
        case WaiverState.EXPIRED:
            return f"{of}: expired on {waiver.expires}. Next step: mend the cell, or renew the row with a reason"
        case WaiverState.NOT_NEEDED:
            return f"{of}, until {waiver.expires}: nothing that it waives is there. Next step: remove the row"
        case _:
            assert_never(waiver.state)


def say_bound(decision: GateDecision) -> list[str]:
    """What the decision is bound to, in short lines."""
    lines = [f"receipts {decision.receipts_sha256[:_SHORT]}, rules {decision.rules_sha256[:_SHORT]}"]
    names = (("commit", decision.commit), ("image digest", decision.image_digest), ("lock hash", decision.lock_hash))
    if told := [f"{name} {value}" for name, value in names if value]:
        lines.append(", ".join(told))
    if decision.signed_by:
        lines.append(f"signed by {decision.signed_by}")
    if decision.baseline:
        lines.append(f"compared with {decision.baseline}, receipts {decision.baseline_sha256[:_SHORT]}")
    return lines


def _name(cells: tuple[str, ...]) -> str:
    shown = ", ".join(cells[:_MOST_NAMED])
    return f"{shown} and {count(len(cells) - _MOST_NAMED, 'other')}" if len(cells) > _MOST_NAMED else shown
