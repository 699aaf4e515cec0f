"""What every good run of a cell leaves: `python -m tests.cells checks` writes it to `matrix/checks.json` for the gate.

On an H200 that is what all committed receipts of the stack in production have in common, on a CPU what the cells leave
that are run for it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.evidence.receipt import Receipt
from megacpp_validate.evidence.store import read_receipt
from tests.replay.harness import ROOT

from .run import native_orders, run_cells

CHECKS: Final = ROOT / "matrix" / "checks.json"
# Speeds are timed only on request, states of other releases are loaded where they are, FlashAttention 4 is an extra.
_NOT_ALWAYS: Final = re.compile(r"speed|from\.|(attention\.)?fa4\b(?!\.present)")

Required = dict[str, dict[str, Any]]


def required_on_h200() -> Required:
    """Probe -> its checks with their number of parts, and its backends."""
    files = sorted((ROOT / "docs" / "evidence").rglob(f"{read_catalog().pinned.id}-h200-*.json.xz"))
    return _common(map(read_receipt, files))


def required_on_cpu(jobs: int) -> Required:
    """The same of the cells that a CPU can run, which are run for it."""
    return _common(run_cells(native_orders(), jobs))


def _common(receipts: Iterable[Receipt]) -> Required:
    """What the good receipts of each probe have in common."""
    made: dict[str, list[dict[str, int]]] = defaultdict(list)
    seen: dict[str, list[set[str]]] = defaultdict(list)
    for one in receipts:
        if one.outcome.is_good:
            made[one.probe].append({name: number for name, number in _count_parts(one) if not _NOT_ALWAYS.match(name)})
            seen[one.probe].append({row.path for row in one.backends if not _NOT_ALWAYS.match(row.path)})
    found = {}
    for probe, rows in sorted(made.items()):
        names = sorted(set.intersection(*map(set, rows)))
        checks = {name: min(row[name] for row in rows) for name in names}
        found[probe] = {"checks": checks, "backends": sorted(set.intersection(*seen[probe]))}
    return found


def _count_parts(receipt: Receipt) -> Iterator[tuple[str, int]]:
    """Checks with their number of parts; what FlashAttention 4 computes is native without it, and beside nothing."""
    extra = tuple(row.path.partition(".")[2] for row in receipt.backends if row.claimed == "fa4")
    for check in receipt.checks:
        is_extra = check.name.startswith(extra)
        yield check.name, sum(not (is_extra and "native" in part.name) for part in check.parts)


def read_required() -> dict[str, Required]:
    """What was written: target -> probe -> checks and backends."""
    return dict(json.loads(CHECKS.read_text(encoding="utf-8")))


def write_required(required: Mapping[str, Required]) -> None:
    """Write it, a line a probe."""
    targets = (
        f' "{target}": {{\n' + ",\n".join(f'  "{probe}": {json.dumps(row)}' for probe, row in probes.items()) + "\n }"
        for target, probes in required.items()
    )
    CHECKS.write_text("{\n" + ",\n".join(targets) + "\n}\n", encoding="utf-8")
