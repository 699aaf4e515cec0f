"""The release gate over the receipts of one H200: open for the release that holds, closed for those that do not."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from megacpp_validate.cli.gate.release_gate_runs import GateAsked, decide_store
from megacpp_validate.evidence.release_gate import GateDecision, GateRule

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"
H200 = EVIDENCE / "h200"
AT = datetime(2026, 11, 22, 20, tzinfo=UTC)


def judge(folder: Path, stack: str = "", **asked: str | Path) -> GateDecision:
    return decide_store(GateAsked(folder, "te-upgrade", stack=stack, at=AT, **asked), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("folder", [H200 / "te2.20.2", H200 / "te2.12.0"], ids=lambda folder: folder.name)
def test_a_release_that_holds_opens_it(folder: Path) -> None:
    decision = judge(folder)
    assert (decision.open, decision.exit_code) == (True, 0)
    assert all(row.accepted for row in decision.required)
    assert decision.culprits == ()
    # Two files of cuDNN are mapped on this host, in healthy processes as in others: told, and no breakage.
    assert all(any("libcudnn is mapped from" in warning for warning in row.warnings) for row in decision.required)
    assert not any("unfused" in warning for row in decision.required for warning in row.warnings)


def test_a_baseline_of_the_same_card_lets_the_release_that_holds_through() -> None:
    decision = judge(H200, "te2.20.2", baseline=H200 / "te2.12.0")
    assert (decision.open, decision.baseline) == (True, "te2.12.0")
    assert not any("baseline" in warning for row in decision.required for warning in row.warnings)
    assert {row.rules for row in decision.cells if row.stack == "te2.17.1"} == {(GateRule.STACK,)}
    assert len(decision.foreign) == 35  # three other releases, what was timed a second time, and native


def test_2_17_1_is_closed_by_attention_and_cudnn() -> None:
    decision = judge(H200 / "te2.17.1")
    assert (decision.open, decision.exit_code) == (False, 1)
    culprit = decision.culprits[0]
    assert (culprit.module, culprit.cause.value, culprit.component) == ("attention", "environment", "cuDNN")
    assert culprit.cascades == ("native_block", "layer_spec")
    assert len(decision.culprits) == 1
    red = [row.probe for row in decision.required if row.closes]
    assert red == ["attention", "native_block", "layer_spec"]


def test_2_17_1_and_a_green_run_of_it_after_name_one_culprit(tmp_path: Path) -> None:
    shutil.copytree(H200 / "te2.17.1", tmp_path / "mon")
    environment = json.loads((tmp_path / "mon" / "te2.17.1-h200-attention.json").read_text())["environment"]
    (tmp_path / "tue").mkdir()
    for path in (H200 / "te2.20.2").glob("te2.20.2-h200-*.json"):
        data = json.loads(path.read_text().replace("te2.20.2", "te2.17.1"))
        data |= {"environment": environment, "started": "2026-11-22T10:00:00+00:00"}
        data["seconds"] = {phase: seconds + 0.5 for phase, seconds in data["seconds"].items()}
        for package in data["packages"]:
            package["version"] = package["version"].replace("2.20.2", "2.17.1")
        (tmp_path / "tue" / path.name.replace("te2.20.2", "te2.17.1")).write_text(json.dumps(data, indent=2) + "\n")
    decision = judge(tmp_path)
    assert [row.run for row in decision.closing] == ["mon"] * 3
    assert [(row.module, row.component, row.cascades) for row in decision.culprits] == [
        ("attention", "cuDNN", ("native_block", "layer_spec"))
    ]


def test_2_14_1_is_closed_by_the_import_and_cublas() -> None:
    decision = judge(H200 / "te2.14.1")
    assert (decision.open, decision.exit_code) == (False, 1)
    assert [(row.module, row.cause.value, row.component) for row in decision.culprits] == [
        ("imports", "binary", "cuBLAS")
    ]
    assert all(row.closes for row in decision.required)
    # The two files of cuDNN answer with two versions there: no row lets that pass.
    assert decision.required[0].rules == (GateRule.OUTCOME, GateRule.SECOND_COPY)


def test_a_release_of_a_golden_image_wants_more_than_these() -> None:
    decision = decide_store(GateAsked(H200 / "te2.20.2", "release", at=AT), None)
    assert decision.exit_code == 4  # of a schema that tells too little, they are no evidence of a breakage
    told = {rule for row in decision.required for rule in row.rules}
    assert {GateRule.MISSING, GateRule.IMAGE, GateRule.LOCK, GateRule.SIGNATURE, GateRule.BASELINE} <= told
    assert GateRule.SECOND_COPY in told  # and no second copy is known to be harmless there


@pytest.mark.parametrize("folder", ["fp8/te2.12.0", "fp8/te2.20.2", "smoke/small"])
def test_committed_receipts_bind_to_their_release_and_card(folder: str) -> None:
    """What each says of its stack and target is what it loaded and ran on, and none took another path than it says."""
    stack = next((EVIDENCE / folder).glob("*.json")).name.partition("-")[0]
    decision = decide_store(GateAsked(EVIDENCE / folder, "nightly", stack=stack, target="h200", at=AT), None)
    judged = [row for row in decision.required if row.outcome is not None]
    assert judged
    # They are older than the schema that tells what was not watched, and deep_gemm was not prewarmed for them.
    assert {rule for row in judged for rule in row.rules} <= {GateRule.SCHEMA, GateRule.JIT, GateRule.COMMIT}


def test_memory_of_healthy_releases_closes_nothing() -> None:
    """fp8_torchao has 94 MiB in 2.12.0 and 139 in 2.20.2, and expert_gemm 1376 in 2.20.2 and 1504 in 2.12.0."""
    up = GateAsked(EVIDENCE / "fp8/te2.20.2", "nightly", at=AT, target="h200", baseline=EVIDENCE / "fp8/te2.12.0")
    for decision in (decide_store(up, None), judge(H200 / "te2.12.0", baseline=H200 / "te2.20.2")):
        assert decision.baseline
        assert not [row.probe for row in decision.cells if GateRule.MEMORY in row.rules]
