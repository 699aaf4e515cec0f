"""Receipts of many stacks, judged step by step; also those that were made earlier."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import typer

from ...canary.dynamic.slowdown import CardNoise, compare_timings, measure_noise
from ...canary.dynamic.step import StackReceipts, compare_all
from ...canary.dynamic.upgrade_result import StepResult, TimingChange, UpgradeResult
from ...catalog.bridge import BridgeModule, Catalog
from ...catalog.needs import Needs, read_needs
from ...environments.session_result import SupportGrid, build_support
from ...environments.stacks import AGAIN, RanStack, StackRun
from ...evidence.receipt import Receipt
from ...evidence.store import ReceiptInvalid, Receipts, read_receipts
from ..app import TOOL, Exit, foreseen, refuse
from .canary_telling import Telling


def judge_stacks(
    stacks: Sequence[StackReceipts],
    again: Mapping[str, Receipt],
    modules: Sequence[BridgeModule],
    target: str,
    needs: Needs,
) -> tuple[StepResult, ...]:
    """The step between each stack and the next.

    Args:
        stacks: oldest first.
        again: of a second run of one of them, by probe; none where nothing was timed.
        modules: in dependency order, those that were run.
        target: id.
        needs: what releases are known to need.
    """
    twice = {receipt.stack for receipt in again.values()}
    first = next((stack for stack in stacks if stack.stack in twice), None)
    noise = measure_noise(_by_probe(first) if first else {}, again)
    return compare_all(stacks, modules, lambda one, other: _timings(one, other, noise), target=target, needs=needs)


def grid_of(stacks: Sequence[StackReceipts], probes: Sequence[str], unreadable: Mapping[str, str]) -> SupportGrid:
    """Stacks x probes: modules in dependency order, then compositions."""
    receipts = [receipt for stack in stacks for receipt in stack.receipts]
    return build_support(receipts, probes, dict(unreadable))


def receipts_of(stack: RanStack) -> StackReceipts:
    """What the comparison takes of a stack that ran."""
    return StackReceipts(stack.run.stack, tuple(stack.receipts.values()))


@foreseen({ReceiptInvalid: Exit.WRONG_ARGUMENTS})
def compare_folders(catalog: Catalog, folders: Sequence[Path], matrix: Path | None, telling: Telling) -> None:
    """Judge the step from each folder to the next.

    Closed where somebody is to blame, and not open where evidence is lost.
    """
    started = time.monotonic()
    for before, after in pairwise(folder.resolve() for folder in folders):
        if before == after:
            refuse(
                f"{after} is given twice in a row: there is no step to judge. Next step: give two folders of receipts.",
                Exit.WRONG_ARGUMENTS,
            )
    found = [read_receipts(folder) for folder in folders]
    for folder, receipts in zip(folders, found, strict=True):
        if not receipts.found and not receipts.unreadable:
            refuse(
                f"there is no receipt in {folder}. Likely cause: a typing error, or its run never began. Next step: "
                "give the folder of one stack, as `te_canary` names it in its last lines.",
                Exit.NOTHING_SELECTED,
            )
    target = _one_of("target", (receipt.target for side in found for receipt in side.found.values()))
    sides = [_read_side(folder, side) for folder, side in zip(folders, found, strict=True)]
    again = next(filter(None, map(_again, folders)), {})
    probes = {receipt.probe for side in sides for receipt in side.receipts}
    lost = {str(fault.file): fault.reason for side in found for fault in side.unreadable}
    modules = [module for module in catalog.modules if lost or module.id in probes]
    columns = [*(row.id for row in modules), *(row.id for row in catalog.compositions if row.id in probes)]
    needs = read_needs([module.id for module in catalog.modules], matrix)
    result = UpgradeResult(
        tool=TOOL,
        target=target,
        tiers=("gpu",),
        grid=grid_of(sides, columns, lost),
        stacks=tuple(
            StackRun(
                stack=side.stack,
                environment="",
                folder=str(folder),
                reused=tuple(receipt.cell for receipt in side.receipts),
            )
            for folder, side in zip(folders, sides, strict=True)
        ),
        steps=judge_stacks(sides, again, modules, target, needs),
        seconds={"gpu": round(time.monotonic() - started, 2)},
    )
    telling(result)
    if result.breaks:
        raise typer.Exit(Exit.CLOSED)
    raise typer.Exit(Exit.EVIDENCE_MISSING if result.lacks or lost else Exit.OPEN)


def _read_side(folder: Path, receipts: Receipts) -> StackReceipts:
    stack = _one_of(f"stack in {folder}", (receipt.stack for receipt in receipts.found.values())) or folder.name
    unreadable = {fault.file.stem: fault.reason for fault in receipts.unreadable}
    return StackReceipts(stack, tuple(receipts.found.values()), unreadable)


def _one_of(what: str, values: Iterable[str]) -> str:
    found = sorted(set(values))
    if len(found) > 1:
        refuse(
            f"the receipts are of more than one {what}: {', '.join(found)}. Likely cause: two runs wrote to one "
            "folder. Next step: give the folder of one stack on one target on either side.",
            Exit.WRONG_ARGUMENTS,
        )
    return found[0] if found else ""


def _again(folder: Path) -> Mapping[str, Receipt]:
    place = folder / AGAIN
    return {receipt.probe: receipt for receipt in read_receipts(place).found.values()} if place.is_dir() else {}


def _timings(one: StackReceipts, other: StackReceipts, noise: CardNoise) -> Sequence[TimingChange]:
    return compare_timings(_by_probe(one), _by_probe(other), noise)


def _by_probe(stack: StackReceipts) -> dict[str, Receipt]:
    return {receipt.probe: receipt for receipt in stack.receipts}
