"""The verdict on each receipt: required ones whole, every other one by what it says of itself. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePosixPath

from ..catalog.gate import GateRules
from ..diagnosis.host_faults import find_host_fault
from ..evidence.receipt import Receipt, cell_id
from ..evidence.release_gate import CellVerdict, GateRule
from ..evidence.store import ReceiptFile, ReceiptInvalid, show_file
from .release_asked import Asked, Baseline, Reason, SignedFolder
from .release_baseline import find_growth
from .release_checks import Bound, find_faults, is_hard, read_bound
from .release_sorted import Rejected, Sorted
from .release_waivers import hold_off

Load = Callable[[ReceiptFile], Receipt]
"""The whole receipt of a file; raises ReceiptInvalid."""


@dataclass(frozen=True)
class Judged:
    """A verdict, and the reasons that no waiver holds off."""

    verdict: CellVerdict
    standing: tuple[Reason, ...]

    @property
    def disowned(self) -> bool:
        """Whether it is of something else than is judged, and no breakage of this."""
        return any(reason.disowns for reason in self.standing)

    @property
    def is_red(self) -> bool:
        """Whether it is rejected for how it ended, now or earlier."""
        return any(reason.rule in (GateRule.OUTCOME, GateRule.CONTRADICTED) for reason in self.standing)

    @property
    def breaks(self) -> bool:
        """Whether it closes the gate by a breakage."""
        return self.verdict.closes and not self.disowned and any(reason.breaks for reason in self.standing)


@dataclass(frozen=True)
class Bench:
    """What one decision looks at.

    Attributes:
        files: every file of the store, sorted.
        split: which of them count.
        counting: whole receipts that count, by cell.
        broken: cells whose receipt counts and cannot be read -> why.
        load: gives the whole of any other.
    """

    files: tuple[ReceiptFile, ...]
    split: Sorted
    load: Load
    counting: Mapping[str, Receipt]
    broken: Mapping[str, str]
    rules: GateRules
    asked: Asked
    baseline: Baseline | None
    signed: SignedFolder | None

    @cached_property
    def bound(self) -> Bound:
        """What every receipt that counts must carry."""
        return read_bound(self.counting)


def make_bench(
    files: tuple[ReceiptFile, ...],
    split: Sorted,
    load: Load,
    rules: GateRules,
    asked: Asked,
    baseline: Baseline | None,
    signed: SignedFolder | None,
) -> Bench:
    """Read whole what counts."""
    counting: dict[str, Receipt] = {}
    broken: dict[str, str] = {}
    for cell, one in split.counting.items():
        try:
            counting[cell] = load(one)
        except ReceiptInvalid as fault:
            broken[cell] = fault.reason
    return Bench(files, split, load, counting, broken, rules, asked, baseline, signed)


def judge_required(bench: Bench) -> Iterator[Judged]:
    """Every required cell, in the order of the matrix."""
    for probe in bench.rules.probes:
        cell = cell_id(bench.asked.stack, bench.rules.target.id, probe)
        one = bench.split.counting.get(cell)
        yield _judge_missing(bench, cell, probe) if one is None else _judge_counting(bench, cell, one)


def judge_others(bench: Bench) -> Iterator[Judged]:
    """Every other receipt, by its place; then what was signed and is not there."""
    for rejected in bench.split.rejected:
        yield _judge_rejected(bench, rejected)
    if bench.signed is not None:
        there = {one.file for one in bench.files}
        for file in map(show_file, sorted(bench.signed.hashes.keys() - there)):
            reason = Reason(GateRule.SIGNATURE, f"{bench.signed.signer} signed {file}, and it is not there", hard=True)
            cell = PurePosixPath(file).name.removesuffix(".json")
            row = CellVerdict(cell=cell, run=str(PurePosixPath(file).parent), closes=True)
            yield Judged(_say(row, [reason]), (reason,))


def _judge_missing(bench: Bench, cell: str, probe: str) -> Judged:
    refused = [row.seen.shown for row in bench.split.rejected if cell in (row.seen.cell, row.seen.stem)]
    text = "there is no receipt of it"
    if refused:
        text += f" that counts: {', '.join(refused[:3])}{' and others' if refused[3:] else ''} is refused"
    reason = Reason(GateRule.MISSING, text, hard=True)
    row = CellVerdict(
        cell=cell, stack=bench.asked.stack, target=bench.rules.target.id, probe=probe, required=True, closes=True,
    )  # fmt: skip
    return Judged(_say(row, [reason]), (reason,))


def _judge_counting(bench: Bench, cell: str, one: ReceiptFile) -> Judged:
    reasons: list[Reason] = []
    warnings: list[str] = []
    receipt = bench.counting.get(cell)
    reasons += _find_unsigned(bench, one)
    if receipt is None:
        reasons.append(Reason(GateRule.UNREADABLE, bench.broken[cell], hard=True))
    else:
        found = [
            *find_faults(receipt, bench.rules, bench.asked, bench.bound, bench.counting),
            *find_growth(receipt, bench.rules, bench.baseline),
        ]
        reasons += [each for each in found if isinstance(each, Reason)]
        warnings += [each for each in found if isinstance(each, str)]
    if other := bench.split.copies.get(cell):
        text = f"its process took to the millisecond what {other} says of another: one is an edited copy of the other"
        reasons.append(Reason(GateRule.REPLAYED, text, hard=True))
    standing, owners = hold_off(cell, reasons, bench.rules, bench.asked)
    row = _row(one, required=True, accepted=not standing, closes=bool(standing), waived_by=", ".join(owners))
    row = row.model_copy(update={"warnings": tuple(warnings)})
    return Judged(_say(row, reasons), standing)


def _judge_rejected(bench: Bench, rejected: Rejected) -> Judged:
    """Its own reason, and that it is not what was signed."""
    rejected = _excuse_host(bench, rejected)
    unsigned = [] if bench.signed is None else list(_find_unsigned(bench, rejected.seen))
    reason = rejected.reason
    if reason.rule is GateRule.CONTRADICTED and any(one.cell == rejected.seen.cell for one in bench.rules.waivers):
        reason = replace(reason, hard=_is_hard_whole(bench, rejected.seen))
    reasons = [reason, *unsigned]
    standing, owners = hold_off(rejected.seen.cell, reasons, bench.rules, bench.asked)
    closes = bool(unsigned) or (rejected.closes and bool(standing))
    warnings = (rejected.warning,) if rejected.warning else ()
    row = _row(rejected.seen, closes=closes, waived_by=", ".join(owners), warnings=warnings)
    return Judged(_say(row, reasons), standing)


def _excuse_host(bench: Bench, rejected: Rejected) -> Rejected:
    """A red receipt that a fault of the host made red: it takes back no younger one, and is no breakage by itself."""
    if rejected.reason.rule not in (GateRule.CONTRADICTED, GateRule.OUTCOME):
        return rejected
    try:
        fault = find_host_fault(bench.load(rejected.seen))
    except ReceiptInvalid:
        return rejected
    if not fault:
        return rejected
    said = f"it met a fault of the host, which says nothing of its module: {fault}"
    if rejected.reason.rule is GateRule.OUTCOME:
        return replace(rejected, reason=Reason(GateRule.NOT_RUN, said, hard=True))
    reason = Reason(GateRule.SUPERSEDED, f"{said}; a younger one of its cell is there", hard=True)
    return replace(rejected, reason=reason, closes=False, warning=f"{rejected.seen.shown}: {said}")


def _is_hard_whole(bench: Bench, one: ReceiptFile) -> bool:
    """Whether a red receipt that a waiver would hold off is of an import, of NaN or Inf, or cannot be read at all."""
    try:
        return is_hard(bench.load(one), bench.counting)
    except ReceiptInvalid:
        return True


def _find_unsigned(bench: Bench, one: ReceiptFile) -> Iterator[Reason]:
    signed = bench.signed
    if signed is None:
        if bench.rules.kind.signature == "required":
            text = f"{bench.rules.kind.id} wants a signed folder, and nobody is named who may sign"
            yield Reason(GateRule.SIGNATURE, text, hard=True)
    elif signed.problem:
        yield Reason(GateRule.SIGNATURE, signed.problem, hard=True)
    elif one.file not in signed.hashes:
        yield Reason(GateRule.SIGNATURE, f"it was not there when {signed.signer} signed the folder", hard=True)
    elif signed.hashes[one.file] != one.sha256:
        yield Reason(GateRule.SIGNATURE, f"it was edited since {signed.signer} signed it", hard=True)


def _say(row: CellVerdict, reasons: Iterable[Reason]) -> CellVerdict:
    told = tuple(reasons)
    rules, texts = tuple(reason.rule for reason in told), tuple(reason.text for reason in told)
    return row.model_copy(update={"rules": rules, "reasons": texts})


def _row(one: ReceiptFile, **verdict: object) -> CellVerdict:
    head = one.head
    said: dict[str, object] = {"cell": one.cell, "run": one.run, "receipt_sha256": one.sha256}
    if head is not None:
        said |= {"stack": head.stack, "target": head.target, "probe": head.probe, "outcome": head.outcome}
    return CellVerdict.model_validate(said | verdict)
