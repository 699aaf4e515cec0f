"""The release gate: rules and receipts in, open or closed out, with a reason for every receipt. Pure.

A function of the context loads receipts, `diagnosis` names culprits, and the time of the decision is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC
from enum import StrEnum
from typing import Any, Final, Literal

from ..catalog.bridge import BridgeModule
from ..catalog.images import Needs
from ..catalog.policies import BREAKAGES, GateRule, GateRules, ReleaseWaiver
from ..diagnosis.culprits import Culprit, blame_receipts
from ..diagnosis.diagnose import find_host_fault
from ..errors import Exit, exit_for
from ..evidence.receipt import Outcome, Receipt, hash_code
from ..evidence.receipts_manifest import hash_manifest
from ..evidence.store import ReceiptFile, ReceiptInvalid
from ..evidence.values import ENVIRONMENT, Cause, Frozen, Result
from .rules import UNKNOWN, Baseline, Entry, GateOptions, Reason, find_faults, find_newest, is_hard, select_receipts

_CAUSES: Final = {
    GateRule.SLOWER: (Cause.PERFORMANCE, "time both again on an idle card, then bisect with `nox -s te_bisect`"),
    GateRule.MEMORY: (Cause.PERFORMANCE, "measure both again, then bisect with `nox -s te_bisect`"),
    GateRule.JIT: (Cause.PERFORMANCE, "prewarm with `nox -s prewarm`, and verify with `nox -s jit_verify`"),
    GateRule.SECOND_COPY: (Cause.ENVIRONMENT, "leave one copy on the path; `nox -s doctor` lists what maps which"),
    GateRule.PRESET: (Cause.NUMERICS, "train in a preset that `nox -s fp8_policy` allows"),
    GateRule.FALLBACK: (Cause.SILENT_FALLBACK, "read the reasons of that path in the receipt, and request what exists"),
}


class WaiverState(StrEnum):
    """Effect of a waiver on a day."""

    HOLDS = "holds"
    EXPIRED = "expired"
    NOT_NEEDED = "not-needed"  # its cell does not break its rule


class GateWaiver(ReleaseWaiver):
    """A waiver, and its effect on the day of the decision.

    Attributes:
        in_vain: whether it has not expired and concerns an import, NaN or Inf, which it cannot cover.
    """

    state: WaiverState
    in_vain: bool = False


class CellVerdict(Frozen):
    """One receipt, or one required cell without a receipt.

    Attributes:
        cell: id of the cell, or the name of an unreadable file.
        run: folder below the store; "." for the store itself, empty without a receipt.
        outcome: None without a valid receipt.
        required: whether the receipt counts for a required cell.
        accepted: whether the receipt is evidence that the required cell passes.
        closes: whether it keeps the gate closed.
        breaks: whether it does so by a breakage, whatever evidence it lacks beside it.
        rules: broken rules in the order of `reasons`, waived ones included.
        warnings: findings that break no rule.
        waived_by: owners of the waivers that cover broken rules; empty for none.
        receipt_sha256: of the file; empty without a file.
    """

    cell: str
    stack: str = ""
    target: str = ""
    probe: str = ""
    run: str = ""
    outcome: Outcome | None = None
    required: bool = False
    accepted: bool = False
    closes: bool = False
    breaks: bool = False
    rules: tuple[GateRule, ...] = ()
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    waived_by: str = ""
    receipt_sha256: str = ""


class GateDecision(Result):
    """Open or closed, and why. The same receipts, rules and time give the same bytes.

    Attributes:
        release: kind of release, as `matrix/gate.toml` names it.
        exit_code: 0 open; 1 closed by a breakage; 4 closed only because evidence is missing.
        cells: required ones in the order of the matrix, then every other receipt by its place.
        missing: required cells without accepted evidence.
        culprits: of the breakages that close the gate, in dependency order.
        commit, image_digest, lock_hash: of the newest receipt that counts; empty if it has none.
        codes: code hashes of receipts that count, except the hash of this checkout; "unknown" for no hash.
        signed_by: signer of the folder; empty without a valid signature.
        unsigned: whether `--unsigned` let the decision go on without a signature.
        baseline: stack with which speed and memory were compared; empty for none.
        rules_sha256: of the rules that were applied, with their waivers.
        receipts_sha256, baseline_sha256: of the manifests: the lines that `sha256sum` writes, sorted by file.
        judged_at: ISO 8601, UTC.
    """

    schema_id: Literal["megacpp-validate/release-gate/1"] = "megacpp-validate/release-gate/1"
    release: str
    stack: str
    target: str
    open: bool
    exit_code: int
    cells: tuple[CellVerdict, ...]
    missing: tuple[str, ...] = ()
    waivers: tuple[GateWaiver, ...] = ()
    culprits: tuple[Culprit, ...] = ()
    commit: str = ""
    image_digest: str = ""
    lock_hash: str = ""
    codes: tuple[str, ...] = ()
    signed_by: str = ""
    unsigned: bool = False
    baseline: str = ""
    rules_sha256: str
    receipts_sha256: str
    baseline_sha256: str = ""
    judged_at: str

    @property
    def exit(self) -> Exit:
        """Exit code of the verb."""
        return Exit(self.exit_code)

    @property
    def required(self) -> tuple[CellVerdict, ...]:
        """The required cells, in the order of the matrix."""
        return tuple(cell for cell in self.cells if cell.required)

    @property
    def closing(self) -> tuple[CellVerdict, ...]:
        """Entries that keep the gate closed."""
        return tuple(cell for cell in self.cells if cell.closes)


@dataclass(frozen=True)
class SignedFolder:
    """The signature of a store.

    Attributes:
        signer: empty without a valid signature of an allowed signer.
        hashes: file -> SHA-256, as signed.
        problem: why there is no valid signature.
    """

    signer: str = ""
    hashes: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class GateContext:
    """Inputs of a decision.

    Attributes:
        load: reads the whole receipt of a file; raises ReceiptInvalid.
        rules: of the kind of release and the target.
        order: stack, time, and required values of receipts.
        modules, needs: modules in dependency order and requirements of releases, for blame.
        baseline: None for no comparison of speed and memory.
        signed: None if the decision goes on without a signature.
    """

    load: Callable[[ReceiptFile], Receipt]
    rules: GateRules
    order: GateOptions
    modules: Sequence[BridgeModule]
    needs: Needs
    baseline: Baseline | None = None
    signed: SignedFolder | None = None


def decide_release(files: Iterable[ReceiptFile], context: GateContext) -> GateDecision:
    """Judge every receipt of a store, in any order, and decide."""
    rules, order, files = context.rules, context.order, tuple(files)
    entries = select_receipts(files, rules, order)
    for entry in entries:
        if entry.required or entry.is_refused_by(GateRule.CONTRADICTED, GateRule.OUTCOME):
            try:
                entry.whole = context.load(entry.file)
            except ReceiptInvalid as fault:
                entry.refuse(GateRule.UNREADABLE, fault.reason, closes=True)
    counting = {entry.cell: entry.whole for entry in entries if entry.required and entry.whole is not None}
    required = list(_judge_required(entries, counting, context))
    others = [entry for entry in entries if not entry.required]
    for entry in others:
        _judge_other(entry, counting, context)
    judged = (*required, *others, *_list_lost(files, context))
    closed = any(entry.closes for entry in judged)
    newest, baseline, signed = find_newest(counting), context.baseline, context.signed
    lacking = (entry.cell for entry in required if any(not reason.breaks for reason in entry.standing))
    return GateDecision(
        release=rules.kind.id, stack=order.stack, target=rules.target.id, open=not closed,
        exit_code=exit_for(breaks=any(entry.breaks for entry in judged), lacks=closed).value,
        judged_at=order.at.isoformat(), cells=tuple(_verdict(entry, context) for entry in judged),
        missing=tuple(lacking), waivers=tuple(_list_waivers(context, judged)),
        culprits=_name_culprits(judged, context),
        codes=tuple(sorted({one.code or UNKNOWN for one in counting.values()} - {hash_code()})),
        signed_by=signed.signer if signed is not None else "", unsigned=signed is None, rules_sha256=rules.sha256,
        receipts_sha256=hash_manifest({one.file: one.sha256 for one in files}),
        baseline=baseline.stack if baseline else "", baseline_sha256=baseline.sha256 if baseline else "",
        commit=newest.commit if newest else "", image_digest=newest.image_digest if newest else "",
        lock_hash=newest.lock_hash if newest else "",
    )  # fmt: skip


def _judge_required(entries: Sequence[Entry], counting: Mapping[str, Receipt], context: GateContext) -> Iterator[Entry]:
    """Every required cell, in the order of the matrix."""
    found = {entry.cell: entry for entry in entries if entry.required}
    for probe in context.rules.probes:
        cell = context.order.own + probe
        entry = found.get(cell)
        if entry is None:
            refused = [one for one in entries if cell in (one.cell, one.file.stem)]
            why = "; ".join(f"{one.file.file}: {one.reasons[0].text}" for one in refused[:3])
            entry = Entry(cell, probe=probe, required=True)
            entry.refuse(GateRule.MISSING, f"no receipt of it counts: {why or 'there is none'}")
        else:
            entry.reasons = [*_find_unsigned(entry.file, context), *entry.reasons]
            if cell in counting:
                for one in find_faults(counting[cell], context.rules, context.order, counting, context.baseline):
                    if isinstance(one, Reason):
                        entry.reasons.append(one)
                    else:
                        entry.warnings.append(one)
        _hold_off(entry, context)
        entry.closes = bool(entry.standing)
        yield entry


def _judge_other(entry: Entry, counting: Mapping[str, Receipt], context: GateContext) -> None:
    """Judge a receipt that does not count.

    A receipt that is red because of a host fault contradicts no younger one and is no breakage.
    """
    whole = entry.whole
    if whole is not None and (fault := find_host_fault(whole)):
        text = f"it met a fault of the host, which is no evidence about its module: {fault}"
        contradicts = entry.is_refused_by(GateRule.CONTRADICTED)
        entry.refuse(GateRule.SUPERSEDED if contradicts else GateRule.NOT_RUN, text, closes=not contradicts)
    elif whole is not None and entry.is_refused_by(GateRule.CONTRADICTED):
        entry.refuse(GateRule.CONTRADICTED, entry.reasons[0].text, closes=True, hard=is_hard(whole, counting))
    unsigned = _find_unsigned(entry.file, context)
    entry.reasons += unsigned
    _hold_off(entry, context)
    entry.closes = bool(unsigned) or (entry.closes and bool(entry.standing))


def _list_lost(files: Iterable[ReceiptFile], context: GateContext) -> Iterator[Entry]:
    """Signed files that are missing."""
    if context.signed is not None:
        for file in sorted(context.signed.hashes.keys() - {one.file for one in files}):
            lost = ReceiptFile(file, "", None)
            entry = Entry(lost.cell, lost, lost.run)
            entry.refuse(GateRule.SIGNATURE, f"{context.signed.signer} signed {file}, and it is not there", closes=True)
            entry.standing = entry.reasons
            yield entry


def _find_unsigned(one: ReceiptFile, context: GateContext) -> list[Reason]:
    """Why no signature covers a file: one reason at most."""
    signed = context.signed
    if signed is None or (not signed.problem and signed.hashes.get(one.file) == one.sha256):
        return []
    text = signed.problem or f"it was added or edited after {signed.signer} signed the folder"
    return [Reason(GateRule.SIGNATURE, text, hard=True)]


def _verdict(entry: Entry, context: GateContext) -> CellVerdict:
    fields: dict[str, Any] = {}
    if (head := entry.file.head) is not None:
        fields = {"stack": head.stack, "target": head.target, "outcome": head.outcome}
    elif entry.required:
        fields = {"stack": context.order.stack, "target": context.rules.target.id}
    return CellVerdict(
        cell=entry.cell, run=entry.run, probe=entry.probe, required=entry.required, closes=entry.closes,
        breaks=entry.breaks, receipt_sha256=entry.file.sha256,
        accepted=entry.required and not entry.standing, warnings=tuple(entry.warnings), waived_by=entry.waived_by,
        rules=tuple(reason.rule for reason in entry.reasons), reasons=tuple(reason.text for reason in entry.reasons),
        **fields,
    )  # fmt: skip


# --- Waivers: they cover known breakages, never missing evidence. ---


def _hold_off(entry: Entry, context: GateContext) -> None:
    """Set the reasons that no waiver covers, and the owners of waivers."""
    owners = {
        one.rule: one.owner
        for one in reversed(context.rules.waivers)
        if one.cell == entry.cell and one.rule in BREAKAGES and _holds(one, context)
    }
    held = [one for one in entry.reasons if not one.hard and one.rule in owners]
    entry.standing = [one for one in entry.reasons if one not in held]
    entry.waived_by = ", ".join(dict.fromkeys(owners[one.rule] for one in held))


def _list_waivers(context: GateContext, judged: Iterable[Entry]) -> Iterator[GateWaiver]:
    """The effect of each waiver of this release on the judged stack and target."""
    broken = {(one.cell, reason.rule) for one in judged for reason in one.reasons}
    standing = {(one.cell, reason.rule) for one in judged for reason in one.standing}
    for one in context.rules.waivers:
        if one.cell.startswith(context.order.own):
            key, holds = (one.cell, one.rule), _holds(one, context)
            state = WaiverState.HOLDS if holds else WaiverState.EXPIRED
            state = state if key in broken else WaiverState.NOT_NEEDED
            yield GateWaiver(**dict(one), state=state, in_vain=holds and key in standing)


def _holds(waiver: ReleaseWaiver, context: GateContext) -> bool:
    return waiver.expires >= context.order.at.astimezone(UTC).date()


# --- Who closes the gate. ---


def _name_culprits(judged: Sequence[Entry], context: GateContext) -> tuple[Culprit, ...]:
    """Culprits in dependency order, shared ones first.

    Receipts of another stack, target or time do not count. A culprit whose cells are all waived is not listed.
    """
    disowned = {one.cell for one in judged if one.required and one.disowned}
    red = {one.probe for one in judged if one.breaks and one.stands_against(GateRule.OUTCOME, GateRule.CONTRADICTED)}
    ranked = sorted(judged, key=lambda one: not one.required)  # a red receipt beside one that counts comes after it
    seen = {one.cell: one.whole for one in ranked if one.whole is not None and one.cell not in disowned}
    found = list(_share(row for one in judged for row in _name_own(one)))
    if red:
        blamed = blame_receipts(tuple(seen.values()), context.modules, context.needs)
        found += [row for row in blamed if red & {row.module, *row.cascades}]
    rank = {one.probe: number for number, one in enumerate(judged) if one.required}
    return tuple(sorted(found, key=lambda row: (rank.get(row.module, -1), row.module, row.cause.value, row.component)))


def _share(rows: Iterable[Culprit]) -> Iterator[Culprit]:
    """The same cause and component in several modules is one culprit: the environment."""
    groups: dict[tuple[Cause, str], list[Culprit]] = {}
    for row in rows:
        groups.setdefault((row.cause, row.component or row.module), []).append(row)
    for first, *more in groups.values():
        names = (first.module, *(row.module for row in more))
        yield first.model_copy(update={"module": ENVIRONMENT, "cascades": names}) if more else first


def _name_own(entry: Entry) -> Iterator[Culprit]:
    """Culprits of the broken rules of a green receipt, one for each cause and component."""
    found: dict[tuple[Cause, str], list[Reason]] = {}
    for reason in () if entry.disowned or entry.stands_against(GateRule.OUTCOME) else entry.standing:
        if reason.rule in _CAUSES:
            found.setdefault((_CAUSES[reason.rule][0], reason.component), []).append(reason)
    for (cause, component), reasons in found.items():
        yield Culprit(
            module=entry.probe, cause=cause, component=component, signature=reasons[0].rule.value,
            summary=". ".join(reason.text for reason in reasons), next_step=_CAUSES[reasons[0].rule][1],
        )  # fmt: skip
