"""What the release gate decided, and what the policy of low precision says of presets."""

from __future__ import annotations

from typing import Final

from ...gate.fp8 import PolicyResult, PresetDecision
from ...gate.release import CellVerdict, GateDecision, GateWaiver
from ...text import count
from ..document import Block, Bullets, Content, Details, Diagnostic, Document, Heading, Table
from ..marks import Mark, bad, good, mark_exit, mark_of, quiet, risk
from .upgrade import describe_culprit, name_culprit
from .words import join_same, list_fields, list_some, tabulate_facts

_FACTS: Final = "judged_at rules_sha256 receipts_sha256 commit image_digest lock_hash codes signed_by baseline"


def describe_gate(decision: GateDecision) -> Document:
    """The answer, every required cell, who closes the gate, and what else there is."""
    required = [_describe_cell(one, one.probe) for one in decision.required]
    others = [_describe_cell(one, _place_of(one)) for one in decision.closing if not one.required]
    culprits = [describe_culprit(one) for one in decision.culprits]
    waivers = [_describe_waiver(one) for one in decision.waivers]
    rest = tuple(_describe_cell(one, _place_of(one)) for one in decision.cells if not one.closes and not one.required)
    warnings = join_same((cell.probe, warning) for cell in decision.cells for warning in cell.warnings)
    notes = [Diagnostic("note", risk("note"), message=text, fields=(("cells", probes),)) for probes, text in warnings]
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
        *((Heading("Notes, which close nothing"), Bullets(tuple(map(": ".join, warnings)))) if warnings else ()),
        Details(f"{count(rest, 'receipt')} that do not count", rest),
        tabulate_facts(list_fields(decision, _FACTS)),
    )
    title = f"Release gate: {decision.release} of {decision.stack} on {decision.target}"
    # Closed because evidence is missing is another thing than closed by a breakage.
    mark = mark_exit(0 if decision.open else decision.exit_code, otherwise="closed, evidence missing")
    return Document(title, _summarize(decision), mark, blocks, (*required, *others, *culprits, *waivers, *notes))


def _summarize(decision: GateDecision) -> str:
    """The answer in a sentence: who closes the gate, then what is missing."""
    required = decision.required
    if decision.open:
        waived = ", ".join(one.probe for one in required if one.waived_by)
        signed = "" if decision.signed_by else ", without a signature"
        accepted = count(len(required), "required cell")
        return f"The gate is open{signed}: {accepted} accepted; by waiver: {waived or 'none'}."
    rejected = {one.cell for one in required if one.breaks}
    parts = {
        "culprits": "; ".join(map(name_culprit, decision.culprits)),
        "rejected": f"{len(rejected)} of {count(len(required), 'required cell')}" if rejected else "",
        "no evidence of": list_some([cell for cell in decision.missing if cell not in rejected], 5),
        "other receipts that close": str(sum(not one.required for one in decision.closing) or ""),
    }
    return f"The gate is closed; {'; '.join(f'{label}: {text}' for label, text in parts.items() if text)}."


def _place_of(verdict: CellVerdict) -> str:
    """The receipt's run and cell; the cell alone where there is no receipt."""
    return verdict.cell if verdict.run in ("", ".") else f"{verdict.run}/{verdict.cell}"


def _mark(verdict: CellVerdict) -> Mark:
    if verdict.closes:
        return bad("rejected" if verdict.breaks else "no evidence")
    if verdict.waived_by:
        return risk("waived")
    return good("accepted") if verdict.accepted else quiet("does not count")


def _describe_cell(verdict: CellVerdict, name: str) -> Diagnostic:
    reasons = tuple((rule.value, text) for rule, text in zip(verdict.rules, verdict.reasons, strict=True))
    waiver = (("waived by", verdict.waived_by),) if verdict.waived_by else ()
    code = verdict.rules[0].value if verdict.closes and verdict.rules else ""
    group = f"release_gate.{verdict.target}"
    return Diagnostic(name, _mark(verdict), group, fields=(*reasons, *waiver), code=code)


def _describe_waiver(waiver: GateWaiver) -> Diagnostic:
    return Diagnostic(
        f"{waiver.rule.value} for {waiver.cell}",
        bad("no effect") if waiver.in_vain else mark_of(waiver.state),
        "waivers",
        "NaN, Inf, imports and refused FP8 presets cannot be waived" if waiver.in_vain else waiver.reason,
        (("until", str(waiver.expires)), ("owner", waiver.owner), ("link", waiver.link)),
    )


def describe_policy(result: PolicyResult) -> Document:
    """The answer, and each preset with every refusal and its reason."""
    cases = tuple(map(_describe_preset, result.presets))
    answers = join_same((case.name, case.mark.word) for case in cases)
    words = "; ".join(f"{word}: {names}" for names, word in answers) or "No preset was selected"
    mark = bad("disagrees") if result.breaks else good("agrees")
    summary = f"{count(result.rules, 'rule')}. {words}."
    return Document("Low-precision policy", summary, mark, cases, cases)


def _describe_preset(decision: PresetDecision) -> Diagnostic:
    preset = decision.preset
    runs = join_same((part, low.recipe) for low in preset.low for part in low.parts)
    fields: list[tuple[str, Content]] = [
        ("runs", tuple(f"{recipe}: {parts}" for parts, recipe in runs) or "everything in BF16"),
        ("in BF16", f"first {preset.bf16_first} and last {preset.bf16_last} of {len(preset.pattern)} layers"),
        ("targets", ", ".join(preset.targets)),
        ("refuses nothing of it", ", ".join(decision.not_refused_by)),
    ]
    for one in decision.refusals:
        rule = one.rule
        fields += [("refused", f"{rule.refuses} [{rule.id}]: {one.found}"), ("why", rule.reason)]
        fields += [("source", rule.source), ("next", rule.next)]
    fields.append(("measured", preset.measured))
    step = "put the rule back, or remove refused_by where the preset may run now" if decision.not_refused_by else ""
    return Diagnostic(preset.id, mark_of(decision.outcome), "fp8_policy", preset.says, tuple(fields), step)
