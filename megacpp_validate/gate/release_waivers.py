"""Which breakages of a release a waiver holds off, and what each waiver does. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from datetime import UTC

from ..catalog.gate import GateRules, ReleaseWaiver
from ..evidence.release_gate import WAIVABLE, CellVerdict, GateRule, GateWaiver, WaiverState
from .release_asked import Asked, Reason


def hold_off(
    cell: str, reasons: Sequence[Reason], rules: GateRules, asked: Asked
) -> tuple[tuple[Reason, ...], tuple[str, ...]]:
    """The reasons that stand, and who answers for those that do not."""
    standing: list[Reason] = []
    owners: dict[str, None] = {}
    for reason in reasons:
        waiver = None if _is_hard(reason) else _find(cell, reason, rules, asked)
        if waiver is None:
            standing.append(reason)
        else:
            owners[waiver.owner] = None
    return tuple(standing), tuple(owners)


def see_waivers(
    rules: GateRules, asked: Asked, cells: Iterable[CellVerdict], standing: Set[tuple[str, GateRule]]
) -> tuple[GateWaiver, ...]:
    """What each waiver of this release does for the judged stack and target.

    Args:
        standing: cells and the rules that they break and no waiver holds off.
    """
    broken = {(verdict.cell, rule) for verdict in cells for rule in verdict.rules}
    judged = f"{asked.stack}-{rules.target.id}-"
    return tuple(
        GateWaiver(
            cell=waiver.cell,
            rule=waiver.rule,
            owner=waiver.owner,
            reason=waiver.reason,
            link=waiver.link,
            expires=waiver.expires,
            state=_state(waiver, (waiver.cell, waiver.rule) in broken, asked),
            in_vain=_holds(waiver, asked) and (waiver.cell, waiver.rule) in standing,
        )
        for waiver in rules.waivers
        if waiver.cell.startswith(judged)
    )


def _is_hard(reason: Reason) -> bool:
    return reason.hard or reason.rule not in WAIVABLE


def _find(cell: str, reason: Reason, rules: GateRules, asked: Asked) -> ReleaseWaiver | None:
    own = (waiver for waiver in rules.waivers if (waiver.cell, waiver.rule) == (cell, reason.rule))
    return next((waiver for waiver in own if _holds(waiver, asked)), None)


def _holds(waiver: ReleaseWaiver, asked: Asked) -> bool:
    return waiver.expires >= asked.at.astimezone(UTC).date()


def _state(waiver: ReleaseWaiver, needed: bool, asked: Asked) -> WaiverState:
    if not needed:
        return WaiverState.NOT_NEEDED
    return WaiverState.HOLDS if _holds(waiver, asked) else WaiverState.EXPIRED
