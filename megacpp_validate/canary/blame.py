"""Who is to blame for red receipts: the first red module in dependency order; what depends on it is a cascade."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..catalog import BridgeModule
from ..evidence.receipt import Outcome, Receipt

# Neither good nor red: nothing was seen.
_NO_EVIDENCE = frozenset({Outcome.NOT_RUN})


@dataclass(frozen=True)
class Blame:
    """Every red module, filed.

    Attributes:
        culprits: red, and nothing that they depend on is; in dependency order, so the first one is to blame.
        cascades: (module, culprit that it is filed under), in dependency order.
    """

    culprits: tuple[str, ...] = ()
    cascades: tuple[tuple[str, str], ...] = ()


def blame(receipts: Iterable[Receipt], modules: Sequence[BridgeModule]) -> Blame:
    """File the red receipts of one environment.

    A module without a receipt, or whose receipt says `not-run`, is not red. A probe that is no module is a composition:
    it comes after the modules, by name, and depends on all of them. A blocked one depends on what blocks it, too, if
    that comes before it.

    Args:
        receipts: in any order; several of one probe are one that is red if any is.
        modules: in dependency order.
    """
    seen = list(receipts)
    red = {receipt.probe for receipt in seen if not receipt.outcome.is_good and receipt.outcome not in _NO_EVIDENCE}
    known = [module.id for module in modules]
    order = [*known, *sorted(red.difference(known))]
    stands_on = _stands_on(modules)
    stands_on |= {name: set(known) for name in order[len(known) :]}
    for name, blocker in _blocked(seen, red):
        stands_on[name] = {*stands_on[name], blocker, *stands_on[blocker]}
    culprits: list[str] = []
    cascades: list[tuple[str, str]] = []
    for name in order:
        if name not in red:
            continue
        cause = next((culprit for culprit in culprits if culprit in stands_on[name]), None)
        if cause is None:
            culprits.append(name)
        else:
            cascades.append((name, cause))
    return Blame(tuple(culprits), tuple(cascades))


def _stands_on(modules: Sequence[BridgeModule]) -> dict[str, set[str]]:
    """Everything that each module depends on, directly or not. A module that is not known yet adds only itself."""
    found: dict[str, set[str]] = {}
    for module in modules:
        below = set(module.depends_on)
        for other in module.depends_on:
            below |= found.get(other, set())
        found[module.id] = below - {module.id}
    return found


def _blocked(receipts: Sequence[Receipt], red: set[str]) -> list[tuple[str, str]]:
    """(probe, probe that stands in its way) of each blocked receipt whose blocker is red itself."""
    probe_of = {receipt.cell: receipt.probe for receipt in receipts}
    pairs = [(r.probe, probe_of.get(r.blocked_by, "")) for r in receipts if r.outcome is Outcome.BLOCKED]
    return [(name, blocker) for name, blocker in pairs if blocker in red and blocker != name]
