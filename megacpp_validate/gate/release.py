"""Whether receipts let a release through: rules and receipts in, open or closed out, a reason for every receipt. Pure.

Whole receipts come through a function, blame comes from `diagnosis`, and the time of the decision is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC
from pathlib import PurePosixPath
from typing import Any, Final

from .. import TOOL
from ..catalog.bridge import Catalog
from ..catalog.gate import BREAKAGES, GateRule, GateRules, ReleaseWaiver
from ..catalog.needs import Needs
from ..diagnosis.culprits import Culprit, blame_receipts
from ..diagnosis.diagnose import find_host_fault
from ..errors import exit_for
from ..evidence.receipt import Receipt
from ..evidence.receipts_manifest import hash_manifest
from ..evidence.store import ReceiptFile, ReceiptInvalid, show_file
from ..evidence.values import ENVIRONMENT, Cause
from .decision import CellVerdict, GateDecision, GateWaiver, WaiverState
from .rules import Baseline, Order, Reason, find_faults, find_newest, is_hard
from .selection import Entry, rank_by_time, select_receipts

_CAUSES: Final = {
    GateRule.SLOWER: (
        Cause.PERFORMANCE, "time both again on an idle card; if it lasts, bisect it with `nox -s te_bisect`",
    ),
    GateRule.MEMORY: (Cause.PERFORMANCE, "measure both again; if it lasts, bisect it with `nox -s te_bisect`"),
    GateRule.JIT: (
        Cause.PERFORMANCE, "prewarm its kernels with `nox -s prewarm`, and prove it with `nox -s jit_verify`",
    ),
    GateRule.SECOND_COPY: (
        Cause.ENVIRONMENT, "leave one of them on the path; `nox -s doctor` lists what maps which",
    ),
    GateRule.FALLBACK: (
        Cause.SILENT_FALLBACK, "read the reasons beside that path in the receipt, and request what the target has",
    ),
}  # fmt: skip
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
class GateContext:
    """What a decision is made by.

    Attributes:
        load: gives the whole of a receipt.
        rules: of the kind of release and the target.
        order: stack, time, and what receipts must carry.
        known: modules in dependency order, and what releases need: for blame.
        baseline: to compare speed and memory with; None where there is none.
        signed: what the folder was signed as; None where no signature was requested.
    """

    load: Load
    rules: GateRules
    order: Order
    known: tuple[Catalog, Needs]
    baseline: Baseline | None = None
    signed: SignedFolder | None = None

    @property
    def own(self) -> str:
        """What the names of cells of the judged stack and target begin with."""
        return f"{self.order.stack}-{self.rules.target.id}-"

    def try_load(self, one: ReceiptFile) -> Receipt | None:
        """The whole receipt; None where it is invalid."""
        with suppress(ReceiptInvalid):
            return self.load(one)
        return None


def decide_release(files: Iterable[ReceiptFile], context: GateContext) -> GateDecision:
    """Judge every receipt of a store, in any order, and decide."""
    rules, order, files = context.rules, context.order, tuple(files)
    entries = select_receipts(files, rules, order)
    counting: dict[str, Receipt] = {}
    for entry in entries:
        if entry.required and entry.file is not None:
            try:
                counting[entry.cell] = context.load(entry.file)
            except ReceiptInvalid as fault:
                entry.reasons = [Reason(GateRule.UNREADABLE, fault.reason, hard=True)]
    required = list(_judge_required(entries, counting, context))
    others = [entry for entry in entries if not entry.required]
    for entry in others:
        _judge_other(entry, counting, context)
    judged = (*required, *others, *_list_lost(files, context))
    closed = any(entry.closes for entry in judged)
    newest = find_newest(counting)
    carried: dict[str, Any] = {}
    if newest is not None:
        carried |= {name: getattr(newest, name) for name in ("commit", "image_digest", "lock_hash")}
    if context.baseline is not None:
        carried |= {"baseline": context.baseline.stack, "baseline_sha256": context.baseline.sha256}
    lacking = (entry.cell for entry in required if any(not reason.breaks for reason in entry.standing))
    return GateDecision(
        tool=TOOL, release=rules.kind.id, stack=order.stack, target=rules.target.id, open=not closed,
        exit_code=exit_for(breaks=any(entry.breaks for entry in judged), lacks=closed).value,
        judged_at=order.at.isoformat(), cells=tuple(_verdict(entry, context) for entry in judged),
        missing=tuple(lacking), waivers=tuple(_list_waivers(context, judged)),
        culprits=_name_culprits(judged, files, counting, context),
        signed_by=context.signed.signer if context.signed is not None else "", rules_sha256=rules.sha256,
        receipts_sha256=hash_manifest({one.file: one.sha256 for one in files}), **carried,
    )  # fmt: skip


def _judge_required(entries: Sequence[Entry], counting: Mapping[str, Receipt], context: GateContext) -> Iterator[Entry]:
    """Every required cell, in the order of the matrix."""
    found = {entry.cell: entry for entry in entries if entry.required}
    for probe in context.rules.probes:
        cell = context.own + probe
        entry = found.get(cell)
        if entry is None or entry.file is None:
            refused = [one.file.shown for one in entries if one.file and cell in (one.cell, one.file.stem)]
            entry = Entry(cell, probe=probe, required=True)
            entry.refuse(GateRule.MISSING, f"no receipt of it counts; refused: {', '.join(refused[:3]) or 'none'}")
        else:
            reasons = _find_unsigned(entry.file, context)
            if cell in counting:
                for one in find_faults(counting[cell], context.rules, context.order, counting, context.baseline):
                    if isinstance(one, Reason):
                        reasons.append(one)
                    else:
                        entry.warnings.append(one)
            reasons += entry.reasons
            if entry.copy_of:
                text = f"its process took as long, to the millisecond, as that of {entry.copy_of}: one was copied"
                reasons.append(Reason(GateRule.REPLAYED, text, hard=True))
            entry.reasons = reasons
        _hold_off(entry, context)
        entry.closes = bool(entry.standing)
        yield entry


def _judge_other(entry: Entry, counting: Mapping[str, Receipt], context: GateContext) -> None:
    """A receipt that does not count: its own reason, and that it is not what was signed.

    One that a fault of the host made red takes back no younger one, and is no breakage by itself.
    """
    one = entry.file
    assert one is not None
    if entry.is_refused_by(GateRule.CONTRADICTED, GateRule.OUTCOME):
        whole, contradicted = context.try_load(one), entry.is_refused_by(GateRule.CONTRADICTED)
        if whole is not None and (fault := find_host_fault(whole)):
            text = f"it met a fault of the host, which is no evidence about its module: {fault}"
            entry.refuse(GateRule.SUPERSEDED if contradicted else GateRule.NOT_RUN, text, closes=not contradicted)
            entry.warnings += [f"{one.shown}: {text}"] if contradicted else []
        elif contradicted and any(waiver.cell == entry.cell for waiver in context.rules.waivers):
            hard = whole is None or is_hard(whole, counting)
            entry.refuse(GateRule.CONTRADICTED, entry.reasons[0].text, closes=entry.closes, hard=hard)
    unsigned = _find_unsigned(one, context) if context.signed else []
    entry.reasons += unsigned
    _hold_off(entry, context)
    entry.closes = bool(unsigned) or (entry.closes and bool(entry.standing))


def _list_lost(files: Iterable[ReceiptFile], context: GateContext) -> Iterator[Entry]:
    """What was signed and is not there."""
    if context.signed is not None:
        for file in map(show_file, sorted(context.signed.hashes.keys() - {one.file for one in files})):
            path = PurePosixPath(file)
            entry = Entry(path.name.removesuffix(".json"), str(path.parent))
            entry.refuse(GateRule.SIGNATURE, f"{context.signed.signer} signed {file}, and it is not there", closes=True)
            entry.standing = entry.reasons
            yield entry


def _find_unsigned(one: ReceiptFile, context: GateContext) -> list[Reason]:
    signed, text = context.signed, ""
    if signed is None:
        if context.rules.kind.signature == "required":
            text = f"{context.rules.kind.id} requires a signed folder, and --signers is missing"
    elif signed.problem:
        text = signed.problem
    elif signed.hashes.get(one.file) != one.sha256:
        text = f"it was added or edited after {signed.signer} signed the folder"
    return [Reason(GateRule.SIGNATURE, text, hard=True)] if text else []


def _verdict(entry: Entry, context: GateContext) -> CellVerdict:
    fields: dict[str, Any] = {}
    if entry.required and entry.file is None:
        fields = {"stack": context.order.stack, "target": context.rules.target.id}
    elif entry.file is not None:
        fields["receipt_sha256"] = entry.file.sha256
        if (head := entry.file.head) is not None:
            fields |= {"stack": head.stack, "target": head.target, "outcome": head.outcome}
    return CellVerdict(
        cell=entry.cell, run=entry.run, probe=entry.probe, required=entry.required, closes=entry.closes,
        accepted=entry.required and not entry.standing, warnings=tuple(entry.warnings), waived_by=entry.waived_by,
        rules=tuple(reason.rule for reason in entry.reasons), reasons=tuple(reason.text for reason in entry.reasons),
        **fields,
    )  # fmt: skip


# --- Waivers: leave to release with a breakage that is known; missing evidence cannot be waived into being. ---


def _hold_off(entry: Entry, context: GateContext) -> None:
    """Set which reasons stand, and who answers for those that do not."""
    owners = {
        one.rule: one.owner
        for one in reversed(context.rules.waivers)
        if one.cell == entry.cell and one.rule in BREAKAGES and _holds(one, context)
    }
    held = [one for one in entry.reasons if not one.hard and one.rule in owners]
    entry.standing = [one for one in entry.reasons if one not in held]
    entry.waived_by = ", ".join(dict.fromkeys(owners[one.rule] for one in held))


def _list_waivers(context: GateContext, judged: Iterable[Entry]) -> Iterator[GateWaiver]:
    """What each waiver of this release does for the judged stack and target."""
    broken = {(one.cell, reason.rule) for one in judged for reason in one.reasons}
    standing = {(one.cell, reason.rule) for one in judged for reason in one.standing}
    for one in context.rules.waivers:
        if one.cell.startswith(context.own):
            key, holds = (one.cell, one.rule), _holds(one, context)
            state = WaiverState.HOLDS if holds else WaiverState.EXPIRED
            state = state if key in broken else WaiverState.NOT_NEEDED
            yield GateWaiver(**one.model_dump(exclude={"release"}), state=state, in_vain=holds and key in standing)


def _holds(waiver: ReleaseWaiver, context: GateContext) -> bool:
    return waiver.expires >= context.order.at.astimezone(UTC).date()


# --- Who closes the gate. ---


def _name_culprits(
    judged: Sequence[Entry], files: Sequence[ReceiptFile], counting: Mapping[str, Receipt], context: GateContext
) -> tuple[Culprit, ...]:
    """In dependency order, those that several modules share first.

    Receipts that are of something else, or too old, are no evidence of who did it. A culprit that a waiver holds off,
    with all that is filed under it, closes nothing and is not named.
    """
    catalog, needs = context.known

    def blame(receipts: Iterable[Receipt]) -> tuple[Culprit, ...]:
        return blame_receipts(tuple(receipts), catalog.modules, needs)

    required = [one for one in judged if one.required and not one.disowned]
    disowned = {one.cell for one in judged if one.required and one.disowned}
    red = {one.probe for one in required if one.is_held_to(GateRule.OUTCOME)}
    found = []
    if red:
        whole = blame(receipt for cell, receipt in counting.items() if cell not in disowned)
        found += [row for row in whole if red & _list_names([row])]
    found += _share(row for one in required for row in _name_own(one))
    named = _list_names(found)
    # Red receipts that close the gate and do not count for their cells: the newest of each probe.
    closing: dict[str, ReceiptFile] = {}
    for one in judged:
        red_beside = one.closes and not one.required and one.is_held_to(GateRule.OUTCOME, GateRule.CONTRADICTED)
        if one.file and red_beside and one.probe not in named | {""}:
            closing[one.probe] = max(closing.get(one.probe, one.file), one.file, key=rank_by_time)
    for row in blame(_read_runs(closing.values(), files, context)) if closing else ():
        if row.module not in named and closing.keys() & _list_names([row]):
            found.append(row)
    rank = {one.probe: number for number, one in enumerate(judged) if one.required}
    return tuple(sorted(found, key=lambda row: (rank.get(row.module, -1), row.module, row.cause.value, row.component)))


def _list_names(culprits: Iterable[Culprit]) -> set[str]:
    return {name for row in culprits for name in (row.module, *row.cascades)}


def _read_runs(red: Iterable[ReceiptFile], files: Iterable[ReceiptFile], context: GateContext) -> Iterator[Receipt]:
    """Red receipts, and the newest of every other cell of the judged stack and target in their folders."""
    whole = {one.cell: one for one in red}
    folders = {one.run for one in whole.values()}
    beside = (one for one in files if one.run in folders and one.cell.startswith(context.own) and one.stem == one.cell)
    for one in sorted(beside, key=rank_by_time, reverse=True):
        whole.setdefault(one.cell, one)
    for one in whole.values():
        if (receipt := context.try_load(one)) is not None:
            yield receipt


def _share(rows: Iterable[Culprit]) -> Iterator[Culprit]:
    """What several modules meet below Transformer Engine is one culprit: the environment."""
    groups: dict[tuple[Cause, str], list[Culprit]] = {}
    for row in rows:
        groups.setdefault((row.cause, row.component or row.module), []).append(row)
    for first, *more in groups.values():
        names = (first.module, *(row.module for row in more))
        yield first.model_copy(update={"module": ENVIRONMENT, "cascades": names}) if more else first


def _name_own(entry: Entry) -> Iterator[Culprit]:
    """What a green receipt breaks, one culprit a cause and component; a red one has its culprit already."""
    found: dict[tuple[Cause, str], list[Reason]] = {}
    for reason in entry.standing:
        if reason.rule in _CAUSES and not entry.is_held_to(GateRule.OUTCOME):
            found.setdefault((_CAUSES[reason.rule][0], reason.component), []).append(reason)
    for (cause, component), reasons in found.items():
        yield Culprit(
            module=entry.probe, cause=cause, component=component, signature=reasons[0].rule.value,
            summary=". ".join(reason.text for reason in reasons), next_step=_CAUSES[reasons[0].rule][1],
        )  # fmt: skip
