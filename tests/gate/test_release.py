"""The gate on a store that is green throughout, and what holds for all stores.

The same store with one edit each is a scenario of `tests.replay`.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.evidence.receipt import READABLE
from megacpp_validate.evidence.store import read_store
from megacpp_validate.gate.decision import GateDecision
from megacpp_validate.gate.release_folder import GateOptions, decide_folder
from tests.replay.gate import copy_matrix
from tests.replay.receipts import (
    AT,
    PROBES,
    STACK,
    TARGET,
    check,
    fill,
    good,
    jit,
    part,
    place,
    put,
    red,
)  # fmt: skip

H200 = Path(__file__).parents[2] / "docs" / "evidence" / "h200"


def decide(store: Path, matrix: Path | None = None, **options: Any) -> GateDecision:
    given: dict[str, Any] = {"release": "te-upgrade", "target": TARGET, "stack": STACK, "at": AT} | options
    return decide_folder(GateOptions(store, **given), matrix)


def test_the_order_of_files_never_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = fill(tmp_path / "store")
    put(store, red("attention", hours=5.0), good("permute", hours=9.0), run="older")
    first = decide(store)
    for seed in range(5):
        mixed = read_store(store)
        files = list(mixed.files)
        random.Random(seed).shuffle(files)
        monkeypatch.setattr(
            "megacpp_validate.gate.release_folder.read_store",
            lambda _, files=files, of=mixed: type(of)(store, (*files,)),
        )
        assert decide(store) == first


BAD: tuple[dict[str, Any], ...] = (  # each is no evidence that its cell holds, for a reason of its own
    {"outcome": "timeout", "checks": []}, {"outcome": "not-run", "checks": []}, {"requested": "native"}, {"commit": ""},
    {"started": ""}, {"packages": []}, {"seconds": {"total": 1.0}}, {"jit": jit(after={"triton": 1})},
    {"schema_id": READABLE[0]}, {"outcome": "fail", "checks": [check("x", part(observed=1.0))]},
)  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: next(iter(bad)))
@pytest.mark.parametrize("hours", [0.5, 2.0])
def test_a_bad_receipt_never_opens_a_closed_gate(bad: dict[str, Any], hours: float, tmp_path: Path) -> None:
    store = fill(tmp_path / "store")
    place(store, "permute").unlink()
    put(store, good("permute", hours=hours, **bad), run="another")
    decision = decide(store)
    assert not decision.open
    assert not any(cell.accepted for cell in decision.cells if cell.run == "another")


def test_the_same_receipts_elsewhere_are_the_same_receipts(tmp_path: Path) -> None:
    shutil.copytree(H200 / "te2.20.2", tmp_path / "copy")
    at = AT.replace(hour=23)
    assert decide(tmp_path / "copy", at=at) == decide(H200 / "te2.20.2", at=at)


def test_every_required_cell_has_its_verdict_in_the_order_of_the_matrix(tmp_path: Path) -> None:
    decision = decide(fill(tmp_path / "store"))
    assert [cell.probe for cell in decision.required] == list(PROBES)
    assert all(cell.accepted for cell in decision.required)


OTHERS: dict[str, Callable[[Path], object]] = {  # of a cell that nothing requires
    "red": lambda store: put(store, red("fp8_delayed"), run="other"),
    "red, and good an hour later": lambda store: (
        put(store, red("fp8_delayed", hours=3.0), run="mon"), put(store, good("fp8_delayed", hours=2.0), run="tue"),
    ),
    "unreadable": lambda store: (put(store, good("fp8_delayed")), place(store, "fp8_delayed").write_text("{")),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_where_others_close_a_cell_that_is_not_required_must_be_good_too(name: str, tmp_path: Path) -> None:
    store = fill(tmp_path / "store")
    put(store, good("fp8_current"))
    matrix = copy_matrix(tmp_path, ('others = "list"', 'others = "close"'))
    assert decide(store, matrix).open
    OTHERS[name](store)
    assert decide(store).open
    assert [cell.cell for cell in decide(store, matrix).closing] == [f"{STACK}-{TARGET}-fp8_delayed"]
