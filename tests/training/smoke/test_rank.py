"""Runs of real processes that die, hang or cannot begin: who is at fault is named, and what was saved is taken up."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.training.smoke.order import RunEnd, SmokeOrder, run_smoke
from tests.running_processes import processes_of
from tests.training.smoke.smoke_train import EXPERTS, order_of

pytestmark = pytest.mark.thorough


def run(order: SmokeOrder, folder: Path) -> RunEnd:
    result = run_smoke(order, folder, limit_s=100, silent_s=60)
    assert processes_of(folder) == []
    return result


def test_the_rank_that_made_a_value_that_is_no_number_is_named(tmp_path: Path) -> None:
    result = run(order_of(plan=EXPERTS, fault="nan:1", watch=True), tmp_path)
    assert (result.ending, result.culprits) == ("died", (1,)), result.words
    where = result.receipts[0]["where"]
    assert (where["step"], where["ranks"], where["tensor"]) == (1, [1], "output rows")
    assert result.receipts[0]["check"] == "watch"
    assert [step["step"] for step in result.receipts[1]["steps"]] == [0, 1]


def test_what_no_rank_can_take_accuses_none(tmp_path: Path) -> None:
    order = order_of(plan=EXPERTS, checkpoint_folder=str(tmp_path / "nothing"), resume=True)
    result = run(order, tmp_path / "run")
    assert (result.ending, result.culprits) == ("died", ()), result.words
    assert result.words.startswith("every rank ended the run: WrongCheckpoint: FileNotFoundError")
    assert {receipt["fault"].partition(":")[0] for receipt in result.receipts.values()} == {"WrongCheckpoint"}
