"""What the bridge made of each damaged install, as a document."""

from __future__ import annotations

import re

from ...canary.firewall.result import FirewallCase, FirewallOutcome, FirewallResult
from ...text import count
from ..document import Block, Diagnostic, Document, Heading, Paragraph, Table
from ..marks import mark_exit, mark_of
from .words import tally


def summarize_firewall(result: FirewallResult) -> str:
    """The answer in one sentence."""
    if not result.cases:
        return "No case ran: nothing is known about the firewall."
    if result.holds:
        return f"The firewall holds in {count(result.cases, 'case')}."
    return (
        f"The firewall in {count(result.cases, 'case')}: {tally(mark_of(case.outcome).word for case in result.cases)}."
    )


def describe_firewall(result: FirewallResult, *, verbose: bool = False) -> Document:
    """One row a case that holds; every other case in full, and all of them where asked for."""
    cases = tuple(map(_diagnose, result.cases))
    brief = [not verbose and case.outcome is FirewallOutcome.PASS for case in result.cases]
    rows = tuple(
        (case.case, mark_of(case.outcome), split_reason(case.reason)[0] or "available")
        for case, is_brief in zip(result.cases, brief, strict=True)
        if is_brief
    )
    blocks: tuple[Block, ...] = (
        *(case for case, is_brief in zip(cases, brief, strict=True) if not is_brief),
        Heading("Cases that hold"),
        Table(("damaged install", "verdict", "cause that the bridge reports"), rows),
        Paragraph(f"{result.tool}, Python {result.python}, torch {result.torch or 'none'}."),
    )
    mark = mark_exit(1 if result.breaks else 0 if result.holds else 4, open_="holds", closed="fails")
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
    return Diagnostic(
        name=case.case,
        mark=mark_of(case.outcome),
        group="firewall",
        message="; ".join(case.problems) or f"The bridge reports: {split_reason(case.reason)[0] or 'available'}",
        fields=(
            ("damage", f"{case.damage}; Transformer Engine {case.release}, compiled half: {case.compiled}"),
            ("available", "no answer" if case.available is None else str(case.available)),
            ("reason", case.reason),
            ("native", tuple(f"{module}: {path}" for module, path in case.native_paths.items())),
            ("ended", case.ended),
        ),
        seconds=case.seconds,
    )
