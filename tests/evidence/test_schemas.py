"""Receipts of every version that was ever written are read: real files, as the version's own tool wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megacpp_validate.evidence.receipt import READABLE, Receipt
from megacpp_validate.evidence.store import ReceiptInvalid, read_receipt, read_store

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
def test_the_head_of_a_version_says_what_the_whole_says(version: int) -> None:
    (one,) = read_store(FILES[version].parent).files
    whole = read_receipt(FILES[version])
    for name in ("cell", "outcome", "started", "seconds", "commit", "environment", "schema_id", "peak_memory_mib"):
        assert getattr(one.claims, name) == getattr(whole, name)
    assert one.claims.compiles_after == sum(whole.jit.after.values())
    assert not one.doubtful


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
    (one,) = read_store(path.parent).files
    assert one.head is None
    assert f"megacpp-validate/receipt/{version}'" in one.problem
