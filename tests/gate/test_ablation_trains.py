"""The verb of ablation over real training on the CPU: two pairs of a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import PACKAGE_ROOT
from megacpp_validate.gate.ablation import FeatureAblation
from tests.command_line import Run, make_run_in


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    return make_run_in(tmp_path, "ablate", capfd, monkeypatch)


@pytest.mark.thorough
@pytest.mark.skipif(
    not (PACKAGE_ROOT / "training" / "smoke" / "__main__.py").is_file(), reason="not-run: there is no smoke run"
)
def test_a_second_head_changes_the_loss_and_what_was_trained_stands_in_the_receipt(call: Run, tmp_path: Path) -> None:
    given = ("--size", "tiny", "--device", "cpu", "--steps", "12", "--python", sys.executable, "--receipts", "out")
    code, out, err = call("feature=mtp", *given, "--format", "json")
    assert code == 0, err
    (reported,) = json.loads(out)["features"]
    assert reported["verdict"] in ("win", "tax", "noise")  # which it is depends on what else this machine does
    row = FeatureAblation.model_validate_json((tmp_path / "out" / "mtp.json").read_text())
    assert [run.arm for run in row.runs] == ["off", "on", "off", "on"]
    assert [run.changes["mtp"] for run in row.runs] == [False, True, False, True]
    assert row.loss is not None
    # One seed, one machine, one thread: the same bits.
    assert row.runs[0].losses == row.runs[2].losses != row.runs[1].losses
    assert row.loss.difference != 0
    assert row.runs[1].parameters > row.runs[0].parameters
    assert row.tokens_per_second is not None
    assert all(run.peak_bytes > 0 and run.versions["torch"] for run in row.runs)
