"""The store of the evidence benchmark is evidence, and its table tells what was missed or not run."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path

import pytest

from benchmarks.evidence import Aim, Deed, measure, write_page
from benchmarks.evidence_store import EVIDENCE, Sample, read_samples, write_store
from megacpp_validate.evidence.history import list_rows
from megacpp_validate.evidence.store import read_store

pytestmark = pytest.mark.thorough


@lru_cache
def few() -> tuple[Sample, ...]:
    """The smallest committed receipts."""
    return tuple(sorted(read_samples(), key=lambda sample: len(sample.body))[:6])


def test_what_is_multiplied_is_read_in_full_and_is_another_run_each(tmp_path: Path) -> None:
    size = write_store(tmp_path / "store", 12, few())
    assert size == sum(path.stat().st_size for path in (tmp_path / "store").rglob("*.json"))
    rows = list_rows(read_store(tmp_path / "store"))
    assert len(rows) == 12
    assert all(row.outcome is not None and not row.same_as for row in rows)
    assert len({(row.cell, row.started) for row in rows}) == 12
    assert len(read_samples(EVIDENCE)) > 70


def test_the_same_seed_makes_the_same_store(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_store(tmp_path / name, 6, few())
    texts = [[path.read_bytes() for path in sorted((tmp_path / name).rglob("*.json"))] for name in ("one", "two")]
    assert texts[0] == texts[1]


def test_rows_tell_time_memory_and_what_was_missed_or_not_run() -> None:
    python = (sys.executable, "-c")
    code = "import time; kept = bytearray(64 << 20); time.sleep(0.1); print(0.5)"
    row = measure(Deed("read: every head", (*python, code), Aim(per_second=5000)), 1, 1000, {})
    assert (row["per_second"], row["holds"]) == (2000, False)
    assert row["seconds"] > 0.1
    assert row["mib"] > 64
    kept = measure(Deed("gate", (*python, "raise SystemExit(4)"), Aim(seconds=60), (0, 4)), 1, 1, {})
    assert (kept["holds"], kept["code"]) == (True, 4)
    broken = measure(Deed("gate", (*python, "raise SystemExit('no such | thing')")), 1, 1, {})
    assert "no such | thing" in broken["not_run"]
    data = {"date": "", "machine": "", "receipts": 1, "samples": 1, "bytes": 1, "rounds": 1}
    page = write_page({**data, "rows": [row, kept, broken]})
    assert "| >= 5000 receipts/s | missed" in page
    assert "| <= 60 s | holds |" in page
    assert "not-run: it ended with 1: no such / thing" in page
