"""What the bridge made of each damaged install, as a document."""

from __future__ import annotations

import re
from typing import Final

from ...canary.firewall.result import FirewallCase, FirewallOutcome, FirewallResult
from ...text import count
from ..document import Block, Content, Diagnostic, Document, Heading, Paragraph, Table
from ..marks import bad, good, missing

OUTCOMES: Final = {
    FirewallOutcome.PASS: good("holds"),
    FirewallOutcome.FAIL: bad("fails"),
    FirewallOutcome.NOT_RUN: missing("not run"),
}


def summarize_firewall(result: FirewallResult) -> str:
    """The answer in one sentence."""
    if not result.cases:
        return "No case ran: nothing is known about the firewall."
    if result.holds:
        return f"The firewall holds in {count(result.cases, 'case')}."
    numbers = {outcome: sum(case.outcome is outcome for case in result.cases) for outcome in FirewallOutcome}
    words = {
        FirewallOutcome.FAIL: "fails in",
        FirewallOutcome.NOT_RUN: "was not tried in",
        FirewallOutcome.PASS: "holds in",
    }
    parts = [f"{word} {numbers[outcome]}" for outcome, word in words.items() if numbers[outcome]]
    return f"The firewall {', '.join(parts)} of {count(result.cases, 'case')}."


def describe_firewall(result: FirewallResult, *, verbose: bool = False) -> Document:
    """One row a case that holds; every other case in full, and all of them where asked for."""
    shown = [case for case in result.cases if verbose or case.outcome is not FirewallOutcome.PASS]
    rows = tuple(
        (case.case, OUTCOMES[case.outcome], split_reason(case.reason)[0] or "available")
        for case in result.cases
        if case not in shown
    )
    blocks: tuple[Block, ...] = tuple(_diagnose(case) for case in shown)
    if rows:
        table = Table(("damaged install", "verdict", "cause that the bridge reports"), rows)
        blocks += (Heading("Cases that hold"), table) if shown else (table,)
    blocks += (Paragraph(f"{result.tool}, Python {result.python}, torch {result.torch or 'none'}."),)
    mark = bad("fails") if result.breaks else good("holds") if result.holds else missing("not run")
    cases = tuple(_diagnose(case) for case in result.cases)
    return Document("Import firewall", summarize_firewall(result), mark, blocks, cases)


def split_reason(reason: str) -> tuple[str, str]:
    """The likely cause and the next step that a reason of the bridge names; its first sentence where it names none."""
    line = " ".join(reason.split())
    cause = re.search(r"Likely cause: (.+?)\.?(?= Next step:| Found:|$)", line)
    step = re.search(r"Next step: (.+?)\.?(?= Found:|$)", line)
    # A full stop inside a version or a file name ends no sentence.
    first = re.split(r"(?<=[.!?])\s+(?=[A-Z`])", line.partition(" Next step:")[0], maxsplit=1)[0]
    return cause[1] if cause else first, step[1] if step else ""


def _diagnose(case: FirewallCase) -> Diagnostic:
    available = {None: "no answer", True: "True", False: "False"}[case.available]
    fields: tuple[tuple[str, Content], ...] = (
        ("damage", f"{case.damage}; Transformer Engine {case.release}, compiled half: {case.compiled}"),
        ("answer", f"is_te_available() is {available}: {case.reason or 'no reason given'}"),
        ("native", tuple(f"{module}: {path}" for module, path in case.native_paths.items())),
        ("ended", case.ended),
    )
    if case.outcome is FirewallOutcome.PASS:
        message = f"The bridge answers as expected: {split_reason(case.reason)[0] or 'available'}"
    else:
        message = "; ".join(case.problems) or "not as expected"
    return Diagnostic(
        name=case.case,
        mark=OUTCOMES[case.outcome],
        group="firewall",
        message=message,
        fields=tuple((label, content) for label, content in fields if content),
        seconds=case.seconds,
        code=case.outcome.value,
    )
