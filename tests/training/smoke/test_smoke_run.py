"""A run of two real ranks is that of one rank; the process answers in its last line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.training.parallel.goodput import PHASES
from megacpp_validate.training.smoke.__main__ import main
from tests.training.smoke.smoke_train import EXPERTS, alone, assert_follows, bounds, order_of, train


def test_two_ranks_reproduce_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    order = order_of(plan=EXPERTS, audit=True)
    asked = {**vars(order), "folder": str(tmp_path / "run"), "limit_s": 100}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(asked)))
    assert main() == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer.keys() == {"ending", "culprits", "words", "seconds", "ranks"}
    assert (answer["ending"], answer["culprits"], answer["words"]) == ("done", [], "")
    assert [receipt["rank"] for receipt in answer["ranks"]] == [0, 1]
    with alone():
        wanted = train({})
        most = bounds({}, wanted)
    for receipt in answer["ranks"]:
        assert_follows(series(receipt), wanted, most)
        assert receipt["dispatches"] == 3
        assert receipt["experts_without_gradient"] == []
        assert receipt["goodput"]["phases_ns"].keys() == set(PHASES)
    assert answer["ranks"][0]["steps"][0]["loss"] == answer["ranks"][1]["steps"][0]["loss"]
    assert (tmp_path / "run" / "rank-1.json").exists()


def series(receipt: dict[str, Any]) -> dict[str, list[float]]:
    return {
        "losses": [step["loss"] for step in receipt["steps"]],
        "norms": [step["grad_norm"] for step in receipt["steps"]],
    }
