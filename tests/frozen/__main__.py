"""`python -m tests.frozen record|compare|checks|boundary [--only CELL] [--fast] [--jobs N] [--receipts FOLDER ...]`.

Without receipts: every cell that a CPU can run, and training. With them: receipts of an H200.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megacpp_validate.evidence.receipt import receipt_text

from .boundary import never_varied
from .cells import list_orders, run_cells, trace_boundary
from .compare import differences, read_rows, row_of, write_evidence, write_rows


def main() -> int:
    """Record, compare, or write the checks that the gate requires: 0 where nothing changed, 1 where something did."""
    parser = argparse.ArgumentParser(prog="python -m tests.frozen", description=__doc__)
    parser.add_argument("verb", choices=["record", "compare", "checks", "boundary"])
    parser.add_argument("--only", default="*", help="cells, with * and ?")
    parser.add_argument("--fast", action="store_true", help="quick cells only: no full shapes, no training")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--receipts", nargs="+", type=Path, help="folders; of a cell in several, the last one counts")
    given = parser.parse_args()
    if given.verb == "checks":
        write_evidence()
        return 0
    if given.verb == "boundary":
        found = [f"{name}: only {kind}" for name, kind in never_varied(trace_boundary(given.jobs)).items()]
    elif given.receipts:
        found = _compare_receipts(given.verb, given.receipts, given.only)
    else:
        found = _compare_cells(given.verb, given.only, given.jobs, fast=given.fast)
    for line in found:
        print(line)  # noqa: T201
    return 1 if found else 0


def _compare_cells(verb: str, only: str, jobs: int, *, fast: bool) -> list[str]:
    orders = {
        cell: order
        for cell, order in list_orders().items()
        if fnmatch.fnmatch(cell, only) and (order.quick or not fast)
    }
    rows: dict[str, Any] = {}
    for cell, receipt in run_cells(orders, jobs):
        rows[cell] = row_of(json.loads(receipt_text(receipt)))
        print(f"{cell}: {receipt.outcome}, {len(receipt.checks)} checks, {receipt.seconds['total']} s", file=sys.stderr)  # noqa: T201
    if verb == "record":
        write_rows("cpu", rows if only == "*" and not fast else read_rows("cpu") | rows)
        return []
    before = read_rows("cpu")
    kept = before if only == "*" and not fast else {cell: before[cell] for cell in rows if cell in before}
    return list(differences(kept, rows))


def _compare_receipts(verb: str, folders: Sequence[Path], only: str) -> list[str]:
    rows: dict[str, Any] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            row = row_of(json.loads(path.read_text(encoding="utf-8")), measured=False)
            known = rows.get(path.stem)
            if known is None or row["outcome"] != "not-run":
                kept = {name: check for name, check in (known or row)["checks"].items() if name.startswith("speed.")}
                rows[path.stem] = {**row, "checks": {**kept, **row["checks"]}}
    if verb == "record":
        write_rows("h200", {**read_rows("h200"), **rows})
        return []
    before = {cell: row for cell, row in read_rows("h200").items() if fnmatch.fnmatch(cell, only)}
    return list(differences(before, {cell: row for cell, row in rows.items() if cell in before}, partly=True))


if __name__ == "__main__":
    sys.exit(main())
