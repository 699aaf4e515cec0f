"""What the release gate decided, in words."""

from __future__ import annotations

from collections import Counter
from typing import Final

from megacpp_validate.catalog.gate import BREAKAGES, GateRule
from megacpp_validate.diagnosis.culprits import Culprit
from megacpp_validate.gate.decision import CellVerdict, GateDecision, GateWaiver, WaiverState
from megacpp_validate.text import count

from ..document import Block, Bullets, Details, Diagnostic, Document, Heading, Paragraph, Table
from ..marks import Mark, bad, good, missing, quiet
from ..marks import risk as risk_mark

# What breaks one of these is of something else than is judged, or too old: what it shows is no breakage of this.
_OF_ANOTHER: Final = frozenset({GateRule.STACK, GateRule.TARGET, GateRule.AGE, GateRule.SCHEMA})
_STATES: Final = {
    WaiverState.HOLDS: (risk_mark("holds"), "the waiver holds until {0.expires}: {0.reason} ({0.link})", ""),
    WaiverState.EXPIRED: (
        bad("expired"), "the waiver expired on {0.expires}", "fix the cell, or renew the waiver with a reason",
    ),
    WaiverState.NOT_NEEDED: (
        quiet("not needed"), "the cell does not break the rule that the waiver is for", "remove the waiver",
    ),
}  # fmt: skip


def describe_gate(decision: GateDecision) -> Document:
    """The answer, every required cell, who closes the gate, and what else there is."""
    required = [_describe_cell(one, one.probe) for one in decision.required]
    others = [_describe_cell(one, place_of(one)) for one in decision.closing if not one.required]
    culprits = [_describe_culprit(one) for one in decision.culprits]
    waivers = [_describe_waiver(one) for one in decision.waivers]
    warnings: dict[str, list[str]] = {}
    for cell in decision.cells:
        for warning in cell.warnings:
            warnings.setdefault(warning, []).append(cell.probe)
    notes = [
        Diagnostic("note", risk_mark("note"), message=text, fields=(("cells", ", ".join(probes)),))
        for text, probes in warnings.items()
    ]
    rows = tuple((one.name, one.mark, ", ".join(label for label, _ in one.fields)) for one in required)
    blocks: list[Block] = [Table(("required cell", "verdict", "rules"), rows)]
    lacking = [one for one in required if one.fields]
    for title, found in (
        ("Closed by", culprits),
        ("Required cells that break a rule", lacking),
        ("Other receipts that close the gate", others),
        ("Waivers", waivers),
    ):
        blocks += [Heading(title), *found] if found else []
    if notes:
        lines = tuple(f"{text} ({', '.join(probes)})" for text, probes in warnings.items())
        blocks.append(Details(f"{count(notes, 'note')} that no rule refuses", (Bullets(lines),)))
    blocks += _describe_rest(decision)
    return Document(
        f"Release gate: {decision.release} of {decision.stack} on {decision.target}",
        summarize_gate(decision),
        mark_gate(decision),
        (*blocks, Paragraph(_say_bound(decision))),
        (*required, *others, *culprits, *waivers, *notes),
    )


def mark_gate(decision: GateDecision) -> Mark:
    """How the answer looks: closed because evidence is missing is another thing than closed by a breakage."""
    if decision.open:
        return good("open")
    return bad("closed") if decision.exit_code == 1 else missing("closed, evidence missing")


def summarize_gate(decision: GateDecision) -> str:
    """The answer in a sentence: who closes the gate, then what is missing."""
    required = decision.required
    if decision.open:
        waived = [one.probe for one in required if one.waived_by]
        ending = f", {', '.join(waived)} by waiver." if waived else "."
        return f"The gate is open: {count(len(required), 'required cell')} accepted{ending}"
    rejected = {one.cell for one in required if _is_rejected(one)}
    parts = [f"{len(rejected)} of {count(len(required), 'required cell')} rejected"] if rejected else []
    if lost := [cell for cell in decision.missing if cell not in rejected]:
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        parts.append(f"no evidence of {', '.join(lost[:5])}{more}")
    if others := [one for one in decision.closing if not one.required]:
        parts.append(f"{count(others, 'other receipt')} in the way")
    by = f" by {'; '.join(map(_name_culprit, decision.culprits))}" if decision.culprits else ""
    return f"The gate is closed{by}: {'; '.join(parts)}."


def place_of(verdict: CellVerdict) -> str:
    """The receipt's run and cell; the cell alone where there is no receipt."""
    return verdict.cell if verdict.run in ("", ".") else f"{verdict.run}/{verdict.cell}"


def _is_rejected(verdict: CellVerdict) -> bool:
    """Whether a cell is closed by a breakage, whatever evidence it lacks beside it.

    A waiver holds off one of its breakages at least, and a verdict does not say which: one more is one that stands.
    """
    breaking = BREAKAGES & {*verdict.rules}
    return verdict.closes and len(breaking) > bool(verdict.waived_by) and not _OF_ANOTHER & {*verdict.rules}


def _mark(verdict: CellVerdict) -> Mark:
    if verdict.closes:
        return bad("rejected" if _is_rejected(verdict) else "no evidence")
    if verdict.waived_by:
        return risk_mark("waived")
    return good("accepted") if verdict.accepted else quiet("does not count")


def _describe_cell(verdict: CellVerdict, name: str) -> Diagnostic:
    reasons = tuple((rule.value, text) for rule, text in zip(verdict.rules, verdict.reasons, strict=True))
    waiver = (("waived by", verdict.waived_by),) if verdict.waived_by else ()
    return Diagnostic(
        name, _mark(verdict), group=f"release_gate.{verdict.target}", fields=(*reasons, *waiver),
        code=verdict.rules[0].value if verdict.closes and verdict.rules else "",
    )  # fmt: skip


def _name_culprit(culprit: Culprit) -> str:
    """Module, component below Transformer Engine, class of cause."""
    return f"{culprit.module} ({', '.join(filter(None, [culprit.component, culprit.cause.value]))})"


def _describe_culprit(culprit: Culprit) -> Diagnostic:
    return Diagnostic(
        _name_culprit(culprit), bad("culprit"), group="culprits", message=culprit.summary, help=culprit.next_step,
        fields=(("cascades", ", ".join(culprit.cascades)),), code=culprit.cause.value,
    )  # fmt: skip


def _describe_waiver(waiver: GateWaiver) -> Diagnostic:
    mark, text, step = _STATES[waiver.state]
    if waiver.in_vain:
        mark, text = bad("no effect"), "the waiver has no effect: NaN, Inf and imports cannot be waived"
        step = "fix the cell"
    return Diagnostic(
        f"{waiver.rule.value} for {waiver.cell}", mark, group="waivers", message=text.format(waiver), help=step,
        fields=(("owner", waiver.owner),),
    )  # fmt: skip


def _describe_rest(decision: GateDecision) -> list[Block]:
    """Receipts that do not count: how many by rule, and each of them."""
    rest = [one for one in decision.cells if not one.closes and not one.required]
    if not rest:
        return []
    numbers = Counter(one.rules[0].value for one in rest if one.rules)
    listed = ", ".join(f"{number} by the rule {rule}" for rule, number in sorted(numbers.items()))
    cells = tuple(_describe_cell(one, place_of(one)) for one in rest)
    return [Details(f"{count(rest, 'receipt')} that do not count: {listed}", cells)]


def _say_bound(decision: GateDecision) -> str:
    """What the decision is bound to."""
    parts = [f"Judged at {decision.judged_at} by the rules {decision.rules_sha256[:12]}"]
    parts.append(f"receipts {decision.receipts_sha256[:12]}")
    for name, value in (
        ("commit", decision.commit), ("image", decision.image_digest), ("lock", decision.lock_hash),
        ("signed by", decision.signed_by), ("baseline", decision.baseline),
    ):  # fmt: skip
        parts += [f"{name} {value}"] if value else []
    return "; ".join(parts) + "."
