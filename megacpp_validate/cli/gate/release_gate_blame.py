"""Who is to blame for red receipts, for the gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...catalog.bridge import Catalog
from ...catalog.needs import Needs
from ...diagnosis.culprits import blame_receipts
from ...evidence.receipt import Receipt
from ...evidence.release_gate import GateCulprit

Blame = Callable[[Sequence[Receipt]], Sequence[GateCulprit]]


def make_blame(catalog: Catalog, needs: Needs) -> Blame:
    """Every red receipt is one that somebody answers for."""

    def blame(receipts: Sequence[Receipt]) -> Sequence[GateCulprit]:
        return [
            GateCulprit(
                module=row.module,
                cause=row.cause,
                component=row.component,
                cascades=row.cascades,
                summary=row.summary,
                next_step=row.next_step,
            )
            for row in blame_receipts(receipts, catalog.modules, needs)
        ]

    return blame
