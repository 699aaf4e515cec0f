"""Sessions of parity, FP8 and the training smoke in words, and the grid of stacks by modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megacpp_validate.evidence.receipt import Machine, Outcome
from megacpp_validate.text import clean_line, count, first_sentence

from ...environments.host_session import NO_RECEIPT, SessionResult, SmokeSession, SupportCell, SupportGrid
from ...gate.fp8 import Fp8Result
from ..curves import draw_loss_curves
from ..document import Block, Bullets, Content, Details, Diagnostic, Document, Paragraph, Table
from ..marks import Tone, bad, find_worst_mark, mark_exit, mark_of, missing, risk
from .loss import describe_verdict
from .receipt import (
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
    name = "MoE smoke" if isinstance(result, SmokeSession) else "FP8" if isinstance(result, Fp8Result) else "Parity"
    group = f"{name.lower()}.{result.stack.replace('.', '_')}.{result.target}"
    machine = next((one.machine for one in result.receipts if one.machine.python), Machine())
    cases = [describe_receipt(receipt, group=group) for receipt in result.receipts]
    extra = list(_describe_extra(result, group))
    shown = [
        case
        for receipt, case in zip(result.receipts, cases, strict=True)
        if not receipt.outcome.is_good or find_fallbacks(receipt)
    ]
    nothing_ran = all(receipt.outcome is Outcome.NOT_RUN for receipt in result.receipts)
    curves = [verdict for verdict in result.loss if verdict.series] if isinstance(result, Fp8Result) else []
    runs = find_main_runs(result.receipts) if isinstance(result, SmokeSession) else ()
    blocks: tuple[Block, ...] = (
        Paragraph(f"Requested: {result.requested}. {result.requested_because}."),
        Paragraph(f"{describe_machine(machine)}; seed {result.seed}."),
        *(Paragraph(double, risk("second copy")) for double in find_doubles(result.receipts)),
        _tabulate(result),
        *describe_training((receipt.probe, receipt, run) for receipt, run in runs),
        *(shown[:1] if nothing_ran else shown),  # one machine, one reason
        *(case for case in extra if case.mark.tone is not Tone.GOOD),
        Details("Loss curves of FP8 beside BF16", tuple(map(draw_loss_curves, curves))),
        *(
            Details(f"{receipt.probe}: {count(receipt.checks, 'check')}", (tabulate_checks(receipt.checks, ""),))
            for receipt in result.receipts
        ),
        Paragraph(f"{result.interpreter}; {result.seconds:.1f} s. Receipts and logs: `{result.folder or 'not kept'}`."),
    )
    mark = mark_exit(
        1 if result.breaks else 0 if result.holds else 4, open_="holds", closed="fails", otherwise="not run"
    )
    title = f"{name} of {result.stack} on {result.target}"
    return Document(title, f"{name} {_summarize(result, extra)}.", mark, blocks, (*cases, *extra))


def _tabulate(result: SessionResult) -> Table:
    rows = tuple(
        (
            receipt.probe,
            mark_of(receipt.outcome),
            describe_backends(receipt),
            count_checks(receipt),
            show_worst(receipt),
            f"{receipt.seconds.get('total', 0.0):.1f}",
        )
        for receipt in result.receipts
    )
    columns = ("probe", "outcome", "requested: seen", "checks", "worst", "seconds")
    return Table(columns, rows, numeric=frozenset({3, 4, 5}), optional=frozenset({5}))


def _describe_extra(result: SessionResult, group: str) -> Iterator[Diagnostic]:
    """What a session judges beside its cells."""
    if not isinstance(result, Fp8Result):
        return
    yield from (replace(describe_verdict(verdict), group=group) for verdict in result.loss)
    if result.loss_missing:
        yield Diagnostic("loss gate", missing("no verdict"), group, f"No verdict on the loss: {result.loss_missing}.")
    if result.policy is not None and not result.policy.holds:
        message = "The FP8 policy and its presets disagree."
        yield Diagnostic("policy", bad("fail"), group, message, help="run `megacpp-validate fp8-policy`")


def _summarize(result: SessionResult, extra: list[Diagnostic]) -> str:
    if not result.receipts:
        return "has no probe to run: nothing is known"
    probes = {outcome: [one.probe for one in result.receipts if one.outcome is outcome] for outcome in Outcome}
    held = count(len(probes.pop(Outcome.PASS)), "probe")
    named = [f"{mark_of(outcome).word}: {', '.join(names)}" for outcome, names in probes.items() if names]
    if len(probes[Outcome.NOT_RUN]) == len(result.receipts):
        named = [f"nothing ran: {first_sentence(find_cause(result.receipts[0])).rstrip('.')}"]
    red = [clean_line(f"{case.name}: {case.mark.word}") for case in extra if case.mark.tone is not Tone.GOOD]
    answer = f"holds in {held}" if result.holds else f"passes {held} of {len(result.receipts)}"
    return "; ".join([answer, *named, *red])


def describe_support(grid: SupportGrid) -> Document:
    """Stacks by modules, and why a cell is not good."""
    rows: tuple[tuple[Content, ...], ...] = tuple(
        (row.stack, row.target, *(mark_of(cell.outcome) for cell in row.cells)) for row in grid.rows
    )
    cases = tuple(
        Diagnostic(
            f"{row.stack}-{row.target}-{cell.module}",
            mark_of(cell.outcome),
            group=f"support.{row.stack.replace('.', '_')}.{row.target}",
            message=_explain_cell(cell),
            fields=(("checks", f"{cell.passed}/{cell.total}" if cell.total else ""),),
        )
        for row in grid.rows
        for cell in row.cells
    )
    unread = tuple(Diagnostic(file, missing("not read"), "files", why) for file, why in grid.unreadable.items())
    blocks: list[Block] = [Table(("stack", "target", *grid.modules), rows)]
    for row in grid.rows:
        day = row.started[:10] or "date unknown"
        blocks.append(Paragraph(f"{row.stack} on {row.target}: {describe_machine(row.machine)}, {day}."))
        red = (cell for cell in row.cells if not cell.outcome.is_good and cell.reason != NO_RECEIPT)
        blocks.append(Bullets(tuple(f"{cell.module}: {_explain_cell(cell)}" for cell in red)))
    releases = [row for row in grid.rows if row.stack != "native"]  # the reference is no release that could hold
    whole = sum(all(cell.outcome.is_good for cell in row.cells) for row in releases)
    summary = (
        f"Releases of Transformer Engine that hold in every module: {whole} of {len(releases)}; "
        f"files that could not be read: {len(unread)}."
    )
    mark = find_worst_mark((case.mark for case in (*cases, *unread)), missing())
    return Document("Support, as receipts show it", summary, mark, (*blocks, *unread), cases + unread)


def _explain_cell(cell: SupportCell) -> str:
    """Why a cell is not good; what blocks it has the reason."""
    if cell.outcome is Outcome.BLOCKED:
        return cell.reason.partition(":")[0]
    return first_sentence(cell.reason)
