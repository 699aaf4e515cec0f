"""Whether receipts let a release through: rules and receipts in, open or closed out, a reason for every receipt. Pure.

Whole receipts come through a function, blame comes from `diagnosis`, and the time of the decision is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC
from pathlib import PurePosixPath
from typing import Any, Final

from .. import TOOL
from ..catalog.bridge import Catalog
from ..catalog.gate import BREAKAGES, GateRule, GateRules, ReleaseWaiver
from ..catalog.needs import Needs
from ..diagnosis.diagnose import find_host_fault
from ..errors import exit_for
from ..evidence.receipt import Receipt, cell_id
from ..evidence.receipts_manifest import hash_manifest
from ..evidence.store import ReceiptFile, ReceiptInvalid, show_file
from .baseline import Baseline, find_growth
from .culprits import Judged, name_culprits
from .decision import CellVerdict, GateDecision, GateWaiver, UnreadableReceipt, WaiverState
from .rules import Order, Reason, find_faults, find_newest, is_hard
from .selection import Rejected, Selection, select_receipts

_FOREIGN: Final = (GateRule.STACK, GateRule.TARGET, GateRule.NOT_REQUIRED)
Load = Callable[[ReceiptFile], Receipt]
"""The whole receipt of a file; raises ReceiptInvalid."""


@dataclass(frozen=True)
class SignedFolder:
    """What somebody signed of a store.

    Attributes:
        signer: who; empty where there is no signature by one who may sign.
        hashes: file -> SHA-256, as it was signed.
        problem: why there is no such signature.
    """

    signer: str = ""
    hashes: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class _Context:
    """What one decision looks at: all files, which of them count, and the whole receipts of those."""

    files: tuple[ReceiptFile, ...]
    selection: Selection
    load: Load
    counting: Mapping[str, Receipt]
    broken: Mapping[str, str]  # cells whose receipt counts and is invalid -> why
    rules: GateRules
    order: Order
    baseline: Baseline | None
    signed: SignedFolder | None


def decide_release(
    files: Iterable[ReceiptFile],
    load: Load,
    rules: GateRules,
    order: Order,
    known: tuple[Catalog, Needs],
    *,
    baseline: Baseline | None = None,
    signed: SignedFolder | None = None,
) -> GateDecision:
    """Judge every receipt of a store, and decide.

    Args:
        files: in any order.
        load: gives the whole of one.
        rules: of the kind of release and the target.
        order: stack, time, and what receipts must carry.
        known: modules in dependency order, and what releases need: for blame.
        baseline: to compare speed and memory with; None where there is none.
        signed: what the folder was signed as; None where no signature was asked for.
    """
    files = tuple(sorted(files, key=lambda one: one.file))
    selection = select_receipts(files, rules, order)
    counting: dict[str, Receipt] = {}
    broken: dict[str, str] = {}
    for cell, one in selection.counting.items():
        try:
            counting[cell] = load(one)
        except ReceiptInvalid as fault:
            broken[cell] = fault.reason
    context = _Context(files, selection, load, counting, broken, rules, order, baseline, signed)
    judged = (*_judge_required(context), *_judge_others(context))
    closed = any(one.verdict.closes for one in judged)
    code = exit_for(breaks=any(one.breaks for one in judged), lacks=closed)
    newest = find_newest(counting)
    carried: dict[str, Any] = {}
    if newest is not None:
        carried |= {name: getattr(newest, name) for name in ("commit", "image_digest", "lock_hash")}
    if baseline is not None:
        carried |= {"baseline": baseline.stack, "baseline_sha256": baseline.sha256}
    return GateDecision(
        tool=TOOL, release=rules.kind.id, stack=order.stack, target=rules.target.id,
        open=not closed, exit_code=int(code), judged_at=order.at.isoformat(),
        cells=tuple(one.verdict for one in judged),
        missing=tuple(one.verdict.cell for one in judged if one.verdict.required and one.lacks_evidence),
        unreadable=tuple(_list_unreadable(context)),
        foreign=tuple(_list_foreign(selection)),
        waivers=_list_waivers(rules, order, judged),
        culprits=name_culprits(judged, files, load, counting, known, f"{order.stack}-{rules.target.id}-"),
        signed_by=signed.signer if signed is not None else "",
        rules_sha256=rules.sha256,
        receipts_sha256=hash_manifest({one.file: one.sha256 for one in files}),
        **carried,
    )  # fmt: skip


def _list_foreign(selection: Selection) -> Iterator[str]:
    return (row.file.shown.removesuffix(".json") for row in selection.rejected if row.reason.rule in _FOREIGN)


def _list_unreadable(context: _Context) -> Iterator[UnreadableReceipt]:
    """By their files: what is invalid at its head, and what is invalid as a whole."""
    odd = (GateRule.UNREADABLE, GateRule.NAME)
    found = [(row.file, row.reason.text) for row in context.selection.rejected if row.reason.rule in odd]
    found += [(context.selection.counting[cell], why) for cell, why in context.broken.items()]
    for one, why in sorted(found, key=lambda row: row[0].shown):
        yield UnreadableReceipt(file=one.shown, receipt_sha256=one.sha256, reason=why)


def _judge_required(context: _Context) -> Iterator[Judged]:
    """Every required cell, in the order of the matrix."""
    rules, order = context.rules, context.order
    for probe in rules.probes:
        cell = cell_id(order.stack, rules.target.id, probe)
        if (one := context.selection.counting.get(cell)) is not None:
            yield _judge_counting(context, cell, one)
            continue
        refused = [row.file.shown for row in context.selection.rejected if cell in (row.file.cell, row.file.stem)]
        text = "there is no receipt of it"
        if refused:
            text += f" that counts: {', '.join(refused[:3])}{' and others' if refused[3:] else ''} is refused"
        verdict = CellVerdict(
            cell=cell, stack=order.stack, target=rules.target.id, probe=probe, required=True, closes=True
        )
        yield _make(verdict, [Reason(GateRule.MISSING, text, hard=True)])


def _judge_counting(context: _Context, cell: str, one: ReceiptFile) -> Judged:
    receipt, rules, order = context.counting.get(cell), context.rules, context.order
    newest = find_newest(context.counting)
    reasons = list(_find_unsigned(context, one))
    warnings: tuple[str, ...] = ()
    if receipt is None or newest is None:
        reasons.append(Reason(GateRule.UNREADABLE, context.broken[cell], hard=True))
    else:
        found = list(find_faults(receipt, rules, order, newest, context.counting))
        found += find_growth(receipt, rules, context.baseline)
        reasons += [each for each in found if isinstance(each, Reason)]
        warnings = tuple(each for each in found if isinstance(each, str))
    if other := context.selection.copies.get(cell):
        text = f"its process took as long, to the millisecond, as that of {other}: one is an edited copy of the other"
        reasons.append(Reason(GateRule.REPLAYED, text, hard=True))
    standing, owners = _hold_off(cell, reasons, rules, order)
    fields: dict[str, Any] = {"waived_by": owners, "accepted": not standing, "closes": bool(standing)}
    return _make(_row(one, required=True, warnings=warnings, **fields), reasons, standing)


def _judge_others(context: _Context) -> Iterator[Judged]:
    """Every other receipt, by its place; then what was signed and is not there."""
    for row in context.selection.rejected:
        yield _judge_rejected(context, _excuse_host(context, row))
    if context.signed is not None:
        there = {one.file for one in context.files}
        for file in map(show_file, sorted(context.signed.hashes.keys() - there)):
            text = f"{context.signed.signer} signed {file}, and it is not there"
            reason = Reason(GateRule.SIGNATURE, text, hard=True)
            path = PurePosixPath(file)
            verdict = CellVerdict(cell=path.name.removesuffix(".json"), run=str(path.parent), closes=True)
            yield _make(verdict, [reason])


def _judge_rejected(context: _Context, row: Rejected) -> Judged:
    """Its own reason, and that it is not what was signed."""
    one, reason = row.file, row.reason
    unsigned = list(_find_unsigned(context, one)) if context.signed else []
    if reason.rule is GateRule.CONTRADICTED and any(waiver.cell == one.cell for waiver in context.rules.waivers):
        whole = _load(context, one)
        reason = replace(reason, hard=whole is None or is_hard(whole, context.counting))
    standing, owners = _hold_off(one.cell, [reason, *unsigned], context.rules, context.order)
    closes = bool(unsigned) or (row.closes and bool(standing))
    warnings = (row.warning,) if row.warning else ()
    return _make(_row(one, closes=closes, waived_by=owners, warnings=warnings), [reason, *unsigned], standing)


def _excuse_host(context: _Context, row: Rejected) -> Rejected:
    """A red receipt that a fault of the host made red: it takes back no younger one, and is no breakage by itself."""
    if row.reason.rule not in (GateRule.CONTRADICTED, GateRule.OUTCOME):
        return row
    whole = _load(context, row.file)
    if whole is None or not (fault := find_host_fault(whole)):
        return row
    text = f"it met a fault of the host, which is no evidence about its module: {fault}"
    if row.reason.rule is GateRule.OUTCOME:
        return replace(row, reason=Reason(GateRule.NOT_RUN, text, hard=True))
    reason = Reason(GateRule.SUPERSEDED, f"{text}; a younger receipt of its cell is there", hard=True)
    return replace(row, reason=reason, closes=False, warning=f"{row.file.shown}: {text}")


def _load(context: _Context, one: ReceiptFile) -> Receipt | None:
    try:
        return context.load(one)
    except ReceiptInvalid:
        return None


def _find_unsigned(context: _Context, one: ReceiptFile) -> Iterator[Reason]:
    signed, text = context.signed, ""
    if signed is None:
        if context.rules.kind.signature == "required":
            text = f"{context.rules.kind.id} requires a signed folder, and --signers names nobody who may sign"
    elif signed.problem:
        text = signed.problem
    elif one.file not in signed.hashes:
        text = f"it was not there when {signed.signer} signed the folder"
    elif signed.hashes[one.file] != one.sha256:
        text = f"it was edited after {signed.signer} signed it"
    if text:
        yield Reason(GateRule.SIGNATURE, text, hard=True)


def _make(row: CellVerdict, reasons: Sequence[Reason], standing: Sequence[Reason] | None = None) -> Judged:
    rules, texts = tuple(reason.rule for reason in reasons), tuple(reason.text for reason in reasons)
    verdict = row.model_copy(update={"rules": rules, "reasons": texts})
    return Judged(verdict, tuple(reasons if standing is None else standing))


def _row(one: ReceiptFile, **fields: Any) -> CellVerdict:
    if (head := one.head) is not None:
        fields |= {"stack": head.stack, "target": head.target, "probe": head.probe, "outcome": head.outcome}
    return CellVerdict(cell=one.cell, run=one.run, receipt_sha256=one.sha256, **fields)


# --- Waivers: leave to release with a breakage that is known; missing evidence cannot be waived into being. ---


def _hold_off(cell: str, reasons: Sequence[Reason], rules: GateRules, order: Order) -> tuple[tuple[Reason, ...], str]:
    """The reasons that stand, and who answers for those that do not."""
    holding = {(one.cell, one.rule): one.owner for one in reversed(rules.waivers) if _holds(one, order)}
    held = [one for one in reasons if not one.hard and one.rule in BREAKAGES and (cell, one.rule) in holding]
    owners = dict.fromkeys(holding[cell, one.rule] for one in held)
    return tuple(one for one in reasons if one not in held), ", ".join(owners)


def _list_waivers(rules: GateRules, order: Order, judged: Iterable[Judged]) -> tuple[GateWaiver, ...]:
    """What each waiver of this release does for the judged stack and target."""
    judged = tuple(judged)
    broken = {(one.verdict.cell, rule) for one in judged for rule in one.verdict.rules}
    standing = {(one.verdict.cell, reason.rule) for one in judged for reason in one.standing}
    found = []
    for one in rules.waivers:
        if one.cell.startswith(f"{order.stack}-{rules.target.id}-"):
            key, holds = (one.cell, one.rule), _holds(one, order)
            state = WaiverState.HOLDS if holds else WaiverState.EXPIRED
            state = state if key in broken else WaiverState.NOT_NEEDED
            fields = one.model_dump(exclude={"release"})
            found.append(GateWaiver(**fields, state=state, in_vain=holds and key in standing))
    return tuple(found)


def _holds(waiver: ReleaseWaiver, order: Order) -> bool:
    return waiver.expires >= order.at.astimezone(UTC).date()
