"""Receipts of every version that was ever written are read: real files, as the version's own tool wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from megacpp_validate.evidence.index import build_index, open_index
from megacpp_validate.evidence.receipt_fields import read_fields, validate_fields

from megacpp_validate.evidence.receipt import READABLE, Receipt
from megacpp_validate.evidence.store import ReceiptInvalid, read_receipt

SCHEMAS = Path(__file__).parent / "schemas"
FILES = {int(path.parent.name): path for path in SCHEMAS.glob("*/*.json")}
VERSIONS = [int(schema.rpartition("/")[2]) for schema in READABLE]


def test_there_is_a_real_file_of_every_readable_version() -> None:
    assert sorted(FILES) == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_is_read_with_what_it_says_and_nothing_made_up(version: int) -> None:
    path = FILES[version]
    data = json.loads(path.read_text(encoding="utf-8"))
    receipt = read_receipt(path)
    assert receipt.schema_id == f"megacpp-validate/receipt/{version}" == data["schema_id"]
    assert (receipt.cell, receipt.outcome.value, receipt.started) == (path.stem, data["outcome"], data["started"])
    assert [check.name for check in receipt.checks] == [check["name"] for check in data["checks"]]
    empty = Receipt(receipt.cell, receipt.stack, receipt.target, receipt.probe, receipt.outcome, "", "")
    later = {name for name in vars(receipt) if name not in data}
    assert all(getattr(receipt, name) == getattr(empty, name) for name in later)
    # What each version does not know yet: the files are of different versions, and not one version under five names.
    unknown = {1: {"timings", "environment"}, 2: {"quantizers"}, 3: {"training"}, 4: set(), 5: set()}[version]
    assert unknown <= later
    assert later or version > 3
    assert ("compiled" in data["jit"]) is (version == 5)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_is_indexed_the_same_quickly_and_in_full(version: int, tmp_path: Path) -> None:
    path = FILES[version]
    text = path.read_bytes()
    quick, full = read_fields(text, path), validate_fields(text, path)
    assert (quick.texts, quick.outcome, quick.numbers) == (full.texts, full.outcome, full.numbers)
    assert (quick.validated, full.validated) == (False, True)
    build_index(path.parent, tmp_path / "index.sqlite")
    (row,) = open_index(tmp_path / "index.sqlite").history(path.stem)
    assert (row.schema_id, row.outcome, row.fault) == (quick.texts["schema_id"], quick.outcome, "")


@pytest.mark.parametrize("version", [0, 6, 99])
@pytest.mark.parametrize("change", [{}, {"colour": "green"}, {"checks": {"by": "another shape"}}], ids=str)
def test_a_version_of_the_future_is_refused_by_name(version: int, change: dict[str, object], tmp_path: Path) -> None:
    data = json.loads(FILES[5].read_text(encoding="utf-8")) | change
    data["schema_id"] = f"megacpp-validate/receipt/{version}"
    path = tmp_path / "store" / FILES[5].name
    path.parent.mkdir()
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    with pytest.raises(ReceiptInvalid, match=f"megacpp-validate/receipt/{version}'"):
        read_receipt(path)
    summary = build_index(path.parent, tmp_path / "index.sqlite")
    assert (summary.receipts, summary.unreadable) == (0, 1)
    (row,) = open_index(tmp_path / "index.sqlite").history(path.stem)
    assert row.outcome is None
    assert f"megacpp-validate/receipt/{version}'" in row.fault
