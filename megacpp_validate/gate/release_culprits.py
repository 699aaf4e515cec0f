"""Who closes a gate: the culprits of red receipts, and of green ones that break a rule. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from typing import Final

from ..evidence.receipt import Receipt
from ..evidence.release_gate import GateCulprit, GateRule
from ..evidence.store import ReceiptFile, ReceiptInvalid
from ..evidence.values import ENVIRONMENT, Cause
from .release_asked import Reason
from .release_cells import Bench, Judged
from .release_sorted import ran_the_same, rank_by_time

Blame = Callable[[Sequence[Receipt]], Sequence[GateCulprit]]
"""Culprits of the receipts of one stack, in dependency order."""

_CAUSES: Final = {
    GateRule.SLOWER: Cause.PERFORMANCE,
    GateRule.MEMORY: Cause.PERFORMANCE,
    GateRule.JIT: Cause.PERFORMANCE,
    GateRule.SECOND_COPY: Cause.ENVIRONMENT,
    GateRule.FALLBACK: Cause.SILENT_FALLBACK,
}
_STEPS: Final = {
    GateRule.SLOWER: "time both again on an idle card; if it lasts, bisect it with `nox -s te_bisect`",
    GateRule.MEMORY: "measure both again; if it lasts, bisect it with `nox -s te_bisect`",
    GateRule.JIT: "prewarm its kernels with `nox -s prewarm`, and prove it with `nox -s jit_verify`",
    GateRule.SECOND_COPY: "leave one of them on the path; `nox -s doctor` says what maps which",
    GateRule.FALLBACK: "see the reasons beside that path in the receipt, and ask for what the target has",
}


def name_culprits(bench: Bench, judged: Sequence[Judged], blame: Blame) -> tuple[GateCulprit, ...]:
    """In dependency order, those that several modules share first.

    Receipts that are of something else, or too old, are no evidence of who did it. A culprit that a waiver holds off,
    with all that is filed under it, closes nothing and is not named.
    """
    required = [one for one in judged if one.verdict.required and not one.disowned]
    of_others = {one.verdict.cell for one in judged if one.verdict.required and one.disowned}
    whole = tuple(receipt for cell, receipt in bench.counting.items() if cell not in of_others)
    red = {one.verdict.probe for one in required if _breaks(one, GateRule.OUTCOME)}
    found = [row for row in blame(whole) if red & {row.module, *row.cascades}] if red else []
    found += _share(row for one in required for row in _name_own(one))
    found += _name_others(bench, judged, {name for row in found for name in (row.module, *row.cascades)}, blame)
    rank = {name: number for number, name in enumerate(bench.rules.probes)}
    return tuple(sorted(found, key=lambda row: (rank.get(row.module, -1), row.module, row.cause.value, row.component)))


def _name_others(bench: Bench, judged: Sequence[Judged], named: Set[str], blame: Blame) -> Iterator[GateCulprit]:
    """Who is to blame for red receipts that close the gate, and do not count for their cells.

    They are blamed as what they are, the receipts of runs: together with what else their run holds, each run once.
    """
    files = {one.shown: one for one in bench.files}
    closing: dict[str, ReceiptFile] = {}  # the newest of each probe
    for row in judged:
        verdict = row.verdict
        if verdict.required or not verdict.closes or verdict.probe in named | {""} or not row.is_red:
            continue
        one = files.get(f"{verdict.run}/{verdict.cell}.json".removeprefix("./"))
        if one is not None:
            closing[verdict.probe] = max(closing.get(verdict.probe, one), one, key=rank_by_time)
    met = set(named)
    for group in _group_runs(closing.values()):
        probes = {one.head.probe for one in group if one.head is not None}
        for found in blame(tuple(_read_run(bench, group))):
            if found.module not in met and probes & {found.module, *found.cascades}:
                yield found
                met |= {found.module, *found.cascades}


def _group_runs(receipts: Iterable[ReceiptFile]) -> list[list[ReceiptFile]]:
    """Those of one folder, or of one commit, environment and image, together."""
    groups: list[list[ReceiptFile]] = []
    for one in receipts:
        near = [group for group in groups if any(_is_one_run(one, other) for other in group)]
        groups = [group for group in groups if group not in near]
        groups.append([*(other for group in near for other in group), one])
    return groups


def _is_one_run(one: ReceiptFile, other: ReceiptFile) -> bool:
    same = one.head is not None and other.head is not None and ran_the_same(one.head, other.head)
    return same or one.run == other.run


def _read_run(bench: Bench, red: Sequence[ReceiptFile]) -> Iterator[Receipt]:
    """Red receipts, and the newest of every other cell of the judged stack and target in their folders."""
    folders, own = {one.run for one in red}, f"{bench.asked.stack}-{bench.rules.target.id}-"
    whole = {one.cell: one for one in red}
    beside = (one for one in bench.files if one.run in folders and one.cell.startswith(own) and one.stem == one.cell)
    for one in sorted(beside, key=rank_by_time, reverse=True):
        whole.setdefault(one.cell, one)
    for one in whole.values():
        with suppress(ReceiptInvalid):
            yield bench.load(one)


def _share(rows: Iterable[GateCulprit]) -> Iterator[GateCulprit]:
    """What several modules meet below Transformer Engine is one culprit: the environment."""
    groups: dict[tuple[Cause, str], list[GateCulprit]] = {}
    for row in rows:
        groups.setdefault((row.cause, row.component or row.module), []).append(row)
    for group in groups.values():
        first = group[0]
        names = tuple(row.module for row in group)
        yield first if len(group) == 1 else first.model_copy(update={"module": ENVIRONMENT, "cascades": names})


def _breaks(judged: Judged, rule: GateRule) -> bool:
    return any(reason.rule is rule for reason in judged.standing)


def _name_own(judged: Judged) -> list[GateCulprit]:
    """What a green receipt breaks, one culprit a cause and component; a red one has its culprit already."""
    if _breaks(judged, GateRule.OUTCOME):
        return []
    found: dict[tuple[Cause, str], list[Reason]] = {}
    for reason in judged.standing:
        if reason.rule in _CAUSES:
            found.setdefault((_CAUSES[reason.rule], reason.component), []).append(reason)
    return [
        GateCulprit(
            module=judged.verdict.probe,
            cause=cause,
            component=component,
            summary=". ".join(reason.text for reason in reasons),
            next_step=_STEPS[reasons[0].rule],
        )
        for (cause, component), reasons in found.items()
    ]
