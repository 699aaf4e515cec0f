"""Sessions of parity, FP8 and the training smoke in words, and the grid of stacks by modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megacpp_validate.evidence.receipt import Machine, Outcome
from megacpp_validate.text import clean_line, count, first_sentence

from ...environments.session_result import NO_RECEIPT, SessionResult, SmokeSession, SupportCell, SupportGrid
from ...gate.fp8_session import Fp8Result
from ..document import Block, Bullets, Content, Details, Diagnostic, Document, Paragraph, Table
from ..drawings.curves import draw_loss_curves
from ..marks import bad, good, missing, risk
from .loss import describe_verdict
from .receipt import (
    MARKS,
    count_checks,
    describe_backends,
    describe_machine,
    describe_receipt,
    find_cause,
    find_doubles,
    find_fallbacks,
    show_worst,
    tabulate_checks,
)
from .training import describe_training, find_main_runs


def describe_session(result: SessionResult) -> Document:
    """A row a probe, then everything that is not good, then what training did."""
    machine = next((one.machine for one in result.receipts if one.machine.python), Machine())
    group = f"{_name(result).lower()}.{result.stack.replace('.', '_')}.{result.target}"
    cases = [describe_receipt(receipt, group=group) for receipt in result.receipts]
    extra = list(_describe_extra(result, group))
    shown = [
        case
        for receipt, case in zip(result.receipts, cases, strict=True)
        if not receipt.outcome.is_good or find_fallbacks(receipt)
    ]
    if all(receipt.outcome is Outcome.NOT_RUN for receipt in result.receipts):
        shown = shown[:1]  # one machine, one reason
    blocks: list[Block] = [
        Paragraph(f"Requested: {result.requested}. {result.requested_because}."),
        Paragraph(f"{describe_machine(machine)}; seed {result.seed}."),
        *(Paragraph(double, risk("second copy")) for double in find_doubles(result.receipts)),
        _tabulate(result),
    ]
    if isinstance(result, SmokeSession):
        runs = [(receipt.probe, receipt, run) for receipt, run in find_main_runs(result.receipts)]
        blocks += describe_training(runs)
    blocks += [*shown, *(case for case in extra if case.mark.tone != "good")]
    if isinstance(result, Fp8Result):
        figures = tuple(draw_loss_curves(verdict) for verdict in result.loss if verdict.series)
        blocks += [Details("Loss curves of FP8 beside BF16", figures)] if figures else []
    blocks += [
        Details(f"{receipt.probe}: {count(receipt.checks, 'check')}", (tabulate_checks(receipt.checks, ""),))
        for receipt in result.receipts
        if receipt.checks
    ]
    where = f" Receipts and logs: `{result.folder}`." if result.folder else ""
    blocks.append(Paragraph(f"{result.interpreter}; {result.seconds:.1f} s.{where}"))
    mark = bad("fails") if result.breaks else good("holds") if result.holds else missing()
    title = f"{_name(result)} of {result.stack} on {result.target}"
    return Document(title, _summarize(result, extra), mark, tuple(blocks), (*cases, *extra))


def describe_support(grid: SupportGrid) -> Document:
    """Stacks by modules, and why a cell is not good."""
    rows: tuple[tuple[Content, ...], ...] = tuple(
        (row.stack, row.target, *(MARKS[cell.outcome] for cell in row.cells)) for row in grid.rows
    )
    cases = tuple(
        Diagnostic(
            f"{row.stack}-{row.target}-{cell.module}",
            MARKS[cell.outcome],
            group=f"support.{row.stack.replace('.', '_')}.{row.target}",
            message=_explain_cell(cell),
            fields=(("checks", f"{cell.passed}/{cell.total}" if cell.total else ""),),
        )
        for row in grid.rows
        for cell in row.cells
    )
    blocks: list[Block] = [Table(("stack", "target", *grid.modules), rows)] if rows else []
    for row in grid.rows:
        seen = row.started[:10] or "date unknown"
        blocks.append(Paragraph(f"{row.stack} on {row.target}: {describe_machine(row.machine)}, {seen}."))
        red = [cell for cell in row.cells if not cell.outcome.is_good and cell.reason != NO_RECEIPT]
        if red:
            blocks.append(Bullets(tuple(f"{cell.module}: {_explain_cell(cell)}" for cell in red)))
    unread = tuple(Diagnostic(file, missing("not read"), "files", why) for file, why in grid.unreadable.items())
    tones = {case.mark.tone for case in cases}
    mark = bad("fails") if "bad" in tones else missing() if "missing" in tones or unread or not rows else good("holds")
    return Document("Support, as receipts show it", _summarize_support(grid), mark, (*blocks, *unread), cases + unread)


def _explain_cell(cell: SupportCell) -> str:
    """Why a cell is not good; what blocks it has the reason."""
    if cell.outcome is Outcome.BLOCKED:
        return cell.reason.partition(":")[0]
    return first_sentence(cell.reason)


def _name(result: SessionResult) -> str:
    if isinstance(result, SmokeSession):
        return "MoE smoke"
    return "FP8" if isinstance(result, Fp8Result) else "Parity"


def _tabulate(result: SessionResult) -> Table:
    rows = tuple(
        (
            receipt.probe,
            MARKS[receipt.outcome],
            describe_backends(receipt),
            count_checks(receipt),
            show_worst(receipt),
            f"{receipt.seconds['total']:.1f}" if "total" in receipt.seconds else "",
        )
        for receipt in result.receipts
    )
    columns = ("probe", "outcome", "requested: seen", "checks", "worst", "seconds")
    return Table(columns, rows, numeric=frozenset({3, 4, 5}), optional=frozenset({5}))


def _describe_extra(result: SessionResult, group: str) -> Iterator[Diagnostic]:
    """What a session judges beside its cells."""
    if not isinstance(result, Fp8Result):
        return
    for verdict in result.loss:
        yield replace(describe_verdict(verdict), group=group)
    if result.loss_missing:
        yield Diagnostic("loss gate", missing("no verdict"), group, f"No verdict on the loss: {result.loss_missing}.")
    if result.policy is not None and not result.policy.holds:
        message = "The FP8 policy and its presets disagree."
        yield Diagnostic("policy", bad("fail"), group, message, help="run `megacpp-validate fp8-policy`")


def _summarize(result: SessionResult, extra: list[Diagnostic]) -> str:
    if not result.receipts:
        return "No probe was selected: nothing is known."
    probes = {outcome: [one.probe for one in result.receipts if one.outcome is outcome] for outcome in Outcome}
    where = f"{result.stack} on {result.target}"
    if result.holds:
        lacking = probes[Outcome.EXPECTED_UNSUPPORTED]
        held = count(len(result.receipts) - len(lacking), "probe")
        also = f"; unsupported there, as expected: {', '.join(lacking)}" if lacking else ""
        return f"{_name(result)} holds in {held} of {where}{also}."
    red = [clean_line(f"{case.name}: {case.mark.word}") for case in extra if case.mark.tone != "good"]
    if len(probes[Outcome.NOT_RUN]) == len(result.receipts):
        why = first_sentence(find_cause(result.receipts[0])).rstrip(".")
        return f"Nothing ran: {'; '.join([why, *red])}."
    named = [
        f"{MARKS[outcome].word} in {', '.join(names)}"
        for outcome, names in probes.items()
        if names and not outcome.is_good
    ]
    return f"{where}: {'; '.join([*named, *red])}."


def _summarize_support(grid: SupportGrid) -> str:
    if not grid.rows:
        return "There is no receipt: nothing is known."
    releases = [row for row in grid.rows if row.stack != "native"]  # the reference is no release that could hold
    whole = [row for row in releases if all(cell.outcome.is_good for cell in row.cells)]
    unread = f"; {count(len(grid.unreadable), 'file')} could not be read" if grid.unreadable else ""
    return f"{len(whole)} of {count(len(releases), 'release')} of Transformer Engine hold in every module{unread}."
