"""What the release gate decided, in words."""

from __future__ import annotations

from typing import Final

from megacpp_validate.catalog.policies import BREAKAGES, GateRule
from megacpp_validate.diagnosis.culprits import Culprit
from megacpp_validate.gate.release import CellVerdict, GateDecision, GateWaiver
from megacpp_validate.text import count

from ..document import Block, Bullets, Details, Diagnostic, Document, Heading, Table
from ..marks import Mark, bad, good, mark_exit, mark_of, quiet, risk
from .words import join_same, list_some, tabulate_facts, tally

# What breaks one of these is of something else than is judged, or too old: what it shows is no breakage of this.
_OF_ANOTHER: Final = frozenset({GateRule.STACK, GateRule.TARGET, GateRule.AGE, GateRule.SCHEMA})


def describe_gate(decision: GateDecision) -> Document:
    """The answer, every required cell, who closes the gate, and what else there is."""
    required = [_describe_cell(one, one.probe) for one in decision.required]
    others = [_describe_cell(one, place_of(one)) for one in decision.closing if not one.required]
    culprits = [_describe_culprit(one) for one in decision.culprits]
    waivers = [_describe_waiver(one) for one in decision.waivers]
    rest = tuple(_describe_cell(one, place_of(one)) for one in decision.cells if not one.closes and not one.required)
    warnings = join_same((cell.probe, warning) for cell in decision.cells for warning in cell.warnings)
    notes = [Diagnostic("note", risk("note"), message=text, fields=(("cells", probes),)) for probes, text in warnings]
    rules = tally(one.fields[0][0] for one in rest if one.fields)
    rows = tuple((one.name, one.mark, ", ".join(label for label, _ in one.fields)) for one in required)
    blocks: tuple[Block, ...] = (
        Table(("required cell", "verdict", "rules"), rows),
        Heading("Closed by"),
        *culprits,
        Heading("Required cells that break a rule"),
        *(one for one in required if one.fields),
        Heading("Other receipts that close the gate"),
        *others,
        Heading("Waivers"),
        *waivers,
        Details(
            f"{count(notes, 'note')} that no rule refuses",
            (Bullets(tuple(f"{text} ({probes})" for probes, text in warnings)),),
        ),
        Details(f"{count(rest, 'receipt')} that do not count, by rule: {rules}", rest),
        tabulate_facts(
            {
                "judged at": decision.judged_at,
                "rules": decision.rules_sha256[:12],
                "receipts": decision.receipts_sha256[:12],
                "commit": decision.commit,
                "image": decision.image_digest,
                "lock": decision.lock_hash,
                "code": ", ".join(code[:12] for code in decision.codes),
                "signed by": decision.signed_by,
                "baseline": decision.baseline,
            }
        ),
    )
    title = f"Release gate: {decision.release} of {decision.stack} on {decision.target}"
    cases = (*required, *others, *culprits, *waivers, *notes)
    return Document(title, summarize_gate(decision), mark_gate(decision), blocks, cases)


def mark_gate(decision: GateDecision) -> Mark:
    """How the answer looks: closed because evidence is missing is another thing than closed by a breakage."""
    return mark_exit(0 if decision.open else decision.exit_code, otherwise="closed, evidence missing")


def summarize_gate(decision: GateDecision) -> str:
    """The answer in a sentence: who closes the gate, then what is missing."""
    required = decision.required
    if decision.open:
        waived = ", ".join(one.probe for one in required if one.waived_by)
        return f"The gate is open: {count(len(required), 'required cell')} accepted; by waiver: {waived or 'none'}."
    rejected = {one.cell for one in required if _is_rejected(one)}
    others = sum(not one.required for one in decision.closing)
    lost = [cell for cell in decision.missing if cell not in rejected]
    parts = {
        "culprits": "; ".join(map(_name_culprit, decision.culprits)),
        "rejected": f"{len(rejected)} of {count(len(required), 'required cell')}" if rejected else "",
        "no evidence of": list_some(lost, 5),
        "other receipts in the way": str(others or ""),
    }
    return f"The gate is closed; {'; '.join(f'{label}: {text}' for label, text in parts.items() if text)}."


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
        return risk("waived")
    return good("accepted") if verdict.accepted else quiet("does not count")


def _describe_cell(verdict: CellVerdict, name: str) -> Diagnostic:
    reasons = tuple((rule.value, text) for rule, text in zip(verdict.rules, verdict.reasons, strict=True))
    waiver = (("waived by", verdict.waived_by),) if verdict.waived_by else ()
    code = verdict.rules[0].value if verdict.closes and verdict.rules else ""
    group = f"release_gate.{verdict.target}"
    return Diagnostic(name, _mark(verdict), group, fields=(*reasons, *waiver), code=code)


def _name_culprit(culprit: Culprit) -> str:
    """Module, component below Transformer Engine, class of cause."""
    return f"{culprit.module} ({', '.join(filter(None, [culprit.component, culprit.cause.value]))})"


def _describe_culprit(culprit: Culprit) -> Diagnostic:
    return Diagnostic(
        _name_culprit(culprit), bad("culprit"), group="culprits", message=culprit.summary, help=culprit.next_step,
        fields=(("cascades", ", ".join(culprit.cascades)),), code=culprit.cause.value,
    )  # fmt: skip


def _describe_waiver(waiver: GateWaiver) -> Diagnostic:
    return Diagnostic(
        f"{waiver.rule.value} for {waiver.cell}",
        bad("no effect") if waiver.in_vain else mark_of(waiver.state),
        group="waivers",
        message="NaN, Inf and imports cannot be waived" if waiver.in_vain else waiver.reason,
        fields=(("until", str(waiver.expires)), ("owner", waiver.owner), ("link", waiver.link)),
    )
