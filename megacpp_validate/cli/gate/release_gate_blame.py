"""Who is to blame for red receipts, asked of the canary for the gate: the two rooms know nothing of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ...canary.dynamic.causes import diagnose
from ...canary.dynamic.compare import is_red
from ...canary.dynamic.step import StackReceipts, compare_stacks
from ...catalog.bridge import Catalog
from ...catalog.needs import Needs
from ...evidence.receipt import Receipt
from ...evidence.release_gate import GateCulprit

_BEFORE: Final = "an earlier stack"  # as it is told where nothing was seen of it
Blame = Callable[[Sequence[Receipt]], Sequence[GateCulprit]]


def make_blame(catalog: Catalog, needs: Needs) -> Blame:
    """The canary's blame with nothing to compare with: every red receipt is one that somebody answers for."""

    def blame(receipts: Sequence[Receipt]) -> Sequence[GateCulprit]:
        if not receipts:
            return ()
        stack, target = receipts[0].stack, receipts[0].target
        after = StackReceipts(stack, tuple(receipts))
        step = compare_stacks(StackReceipts(_BEFORE), after, catalog.modules, target=target, needs=needs)
        found = [
            GateCulprit(
                module=row.module,
                cause=row.cause,
                component=row.component,
                cascades=row.cascades,
                summary=row.summary,
                next_step=row.next_step,
            )
            for row in step.culprits
        ]
        named = {name for row in found for name in (row.module, *row.cascades)}
        return (*found, *(_tell_alone(one) for one in receipts if is_red(one) and one.probe not in named))

    return blame


def _tell_alone(receipt: Receipt) -> GateCulprit:
    """A cell that the canary blames nobody for: a composition says nothing of a step that it was not run before."""
    found = diagnose(receipt)
    return GateCulprit(
        module=receipt.probe,
        cause=found.cause,
        component=found.component,
        summary=receipt.reason,
        next_step="look at its receipt; `nox -s te_bisect` finds the change that broke it",
    )
