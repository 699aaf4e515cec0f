"""Small evidence stores for the tests of the report site: a few committed receipts, and what is changed in them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.cli.gate.report_runs import Asked, write_report
from megacpp_validate.evidence.receipt import Receipt
from megacpp_validate.evidence.receipt_file import write_receipt
from megacpp_validate.evidence.store import read_receipt
from megacpp_validate.report.site_result import SiteResult

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"
NOW = "2026-11-23T00:00:00+00:00"
RUNS = {
    "te2.14.1": ("imports", "attention", "native_block"),
    "te2.17.1": ("imports", "attention", "native_block"),
    "te2.20.2": ("imports", "attention"),
}


def copy_store(store: Path) -> Path:
    """Three releases on an H200, one of them in three runs, and a smoke run."""
    for stack, probes in RUNS.items():
        (store / stack).mkdir(parents=True)
        for probe in probes:
            name = f"{stack}-h200-{probe}.json"
            shutil.copy(EVIDENCE / "h200" / stack / name, store / stack / name)
    smoke = "te2.20.2-h200-smoke_small_delayed.json"
    (store / "smoke").mkdir()
    shutil.copy(EVIDENCE / "smoke" / "small" / smoke, store / "smoke" / smoke)
    first = read_receipt(store / "te2.20.2" / "te2.20.2-h200-imports.json")
    for day, seconds in (("19", 5.0), ("20", 6.0)):
        add(
            store / "earlier" / day, replace(first, started=f"2026-11-{day}T00:00:00+00:00", seconds={"probe": seconds})
        )
    return store


def add(folder: Path, receipt: Receipt) -> Path:
    path = folder / f"{receipt.cell}.json"
    write_receipt(receipt, path)
    return path


def make_site(catalog: Catalog, store: Path, site: Path, *gates: Path, made_at: str = NOW) -> SiteResult:
    database = site.with_name(f"{site.name}.sqlite")
    return write_report(catalog, Asked(store, site, gates, made_at, database))
