"""Who closes a gate: the culprits of red receipts, and of green ones that break a rule. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ..catalog.bridge import Catalog
from ..catalog.gate import GateRule
from ..catalog.needs import Needs
from ..diagnosis.culprits import Culprit, blame_receipts
from ..evidence.receipt import Receipt
from ..evidence.store import ReceiptFile, ReceiptInvalid
from ..evidence.values import ENVIRONMENT, Cause
from .decision import CellVerdict
from .rules import Reason
from .selection import rank_by_time

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
    def breaks(self) -> bool:
        """Whether it closes the gate by a breakage."""
        return self.verdict.closes and not self.disowned and any(reason.breaks for reason in self.standing)

    @property
    def lacks_evidence(self) -> bool:
        """Whether anything but a breakage stands against it."""
        return any(not reason.breaks for reason in self.standing)

    def is_held_to(self, *rules: GateRule) -> bool:
        """Whether one of these rules stands against it."""
        return any(reason.rule in rules for reason in self.standing)


def name_culprits(
    judged: Sequence[Judged],
    files: Sequence[ReceiptFile],
    load: Callable[[ReceiptFile], Receipt],
    counting: Mapping[str, Receipt],
    known: tuple[Catalog, Needs],
    own: str,
) -> tuple[Culprit, ...]:
    """In dependency order, those that several modules share first.

    Receipts that are of something else, or too old, are no evidence of who did it. A culprit that a waiver holds off,
    with all that is filed under it, closes nothing and is not named.

    Args:
        own: what the names of cells of the judged stack and target begin with.
    """
    catalog, needs = known

    def blame(receipts: Iterable[Receipt]) -> tuple[Culprit, ...]:
        return blame_receipts(tuple(receipts), catalog.modules, needs)

    required = [one for one in judged if one.verdict.required and not one.disowned]
    disowned = {one.verdict.cell for one in judged if one.verdict.required and one.disowned}
    red = {one.verdict.probe for one in required if one.is_held_to(GateRule.OUTCOME)}
    found = []
    if red:
        whole = blame(receipt for cell, receipt in counting.items() if cell not in disowned)
        found += [row for row in whole if red & _list_names([row])]
    found += _share(row for one in required for row in _name_own(one))
    closing = _find_closing(judged, files, _list_names(found))
    probes = {one.claims.probe for one in closing}
    for row in blame(_read_runs(closing, files, load, own)) if closing else ():
        if row.module not in _list_names(found) and probes & _list_names([row]):
            found.append(row)
    rank = {one.verdict.probe: number for number, one in enumerate(judged) if one.verdict.required}
    return tuple(sorted(found, key=lambda row: (rank.get(row.module, -1), row.module, row.cause.value, row.component)))


def _list_names(culprits: Iterable[Culprit]) -> set[str]:
    return {name for row in culprits for name in (row.module, *row.cascades)}


def _find_closing(judged: Iterable[Judged], files: Iterable[ReceiptFile], named: Set[str]) -> list[ReceiptFile]:
    """Red receipts that close the gate and do not count for their cells: the newest of each probe."""
    by_place = {one.shown: one for one in files}
    closing: dict[str, ReceiptFile] = {}
    for row in judged:
        verdict = row.verdict
        if verdict.required or not verdict.closes or verdict.probe in named | {""}:
            continue
        one = by_place.get(f"{verdict.run}/{verdict.cell}.json".removeprefix("./"))
        if one is not None and row.is_held_to(GateRule.OUTCOME, GateRule.CONTRADICTED):
            closing[verdict.probe] = max(closing.get(verdict.probe, one), one, key=rank_by_time)
    return list(closing.values())


def _read_runs(
    red: Sequence[ReceiptFile], files: Iterable[ReceiptFile], load: Callable[[ReceiptFile], Receipt], own: str
) -> Iterator[Receipt]:
    """Red receipts, and the newest of every other cell of the judged stack and target in their folders."""
    folders, whole = {one.run for one in red}, {one.cell: one for one in red}
    beside = (one for one in files if one.run in folders and one.cell.startswith(own) and one.stem == one.cell)
    for one in sorted(beside, key=rank_by_time, reverse=True):
        whole.setdefault(one.cell, one)
    for one in whole.values():
        with suppress(ReceiptInvalid):
            yield load(one)


def _share(rows: Iterable[Culprit]) -> Iterator[Culprit]:
    """What several modules meet below Transformer Engine is one culprit: the environment."""
    groups: dict[tuple[Cause, str], list[Culprit]] = {}
    for row in rows:
        groups.setdefault((row.cause, row.component or row.module), []).append(row)
    for first, *more in groups.values():
        names = (first.module, *(row.module for row in more))
        yield first.model_copy(update={"module": ENVIRONMENT, "cascades": names}) if more else first


def _name_own(judged: Judged) -> Iterator[Culprit]:
    """What a green receipt breaks, one culprit a cause and component; a red one has its culprit already."""
    found: dict[tuple[Cause, str], list[Reason]] = {}
    for reason in judged.standing:
        if reason.rule in _CAUSES and not judged.is_held_to(GateRule.OUTCOME):
            found.setdefault((_CAUSES[reason.rule][0], reason.component), []).append(reason)
    for (cause, component), reasons in found.items():
        yield Culprit(
            module=judged.verdict.probe, cause=cause, component=component, signature=reasons[0].rule.value,
            summary=". ".join(reason.text for reason in reasons), next_step=_CAUSES[reasons[0].rule][1],
        )  # fmt: skip
