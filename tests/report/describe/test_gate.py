"""What the release gate, the loss gate, ablation, the policy and history say."""

from __future__ import annotations

from pathlib import Path

from syrupy.assertion import SnapshotAssertion

from megacpp_validate.evidence.history import read_history
from megacpp_validate.gate.ablation import AblationResult, FeatureAblation
from megacpp_validate.gate.fp8 import decide_policy
from megacpp_validate.gate.loss import judge_folder
from megacpp_validate.gate.release_folder import GateOptions, decide_folder
from megacpp_validate.report.describe.ablation import describe_ablation
from megacpp_validate.report.describe.gate import describe_gate
from megacpp_validate.report.describe.history import describe_history
from megacpp_validate.report.describe.loss import describe_losses
from megacpp_validate.report.describe.policy import describe_policy
from megacpp_validate.report.render.terminal import render_terminal
from tests.replay.gate import copy_matrix, write_waiver
from tests.replay.loss import FAULTS, _made_up
from tests.replay.receipts import AT, CODE, STACK, TARGET, fill, good, put, red

EVIDENCE = Path(__file__).parents[3] / "docs" / "evidence"


def test_release_gate(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    options = GateOptions(fill(tmp_path / "store"), "te-upgrade", TARGET, STACK, at=AT, accept_code=(CODE,))
    put(tmp_path / "store", good("attention", retries=["node-fail: the node was lost (node n3)"]))
    pages = [describe_gate(decide_folder(options))]
    put(tmp_path / "store", red("permute"), run=".")
    put(tmp_path / "store", red("attention", hours=0.5))
    (tmp_path / "store" / "run" / f"{STACK}-{TARGET}-layer_spec.json").unlink()
    copy_matrix(tmp_path)
    write_waiver(tmp_path / "matrix", "outcome", "2026-11-21", f"{STACK}-{TARGET}-attention")
    pages.append(describe_gate(decide_folder(options, tmp_path / "matrix")))
    assert [page.mark.tone.value for page in pages] == ["good", "bad"]
    text = "\n\n".join(render_terminal(page, verbose=True) for page in pages)
    assert _without_hashes(text) == snapshot


def test_loss_gate(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    pages = []
    for name, recipe in (("nothing", ""), ("late gap 0.05", "delayed"), ("other data", "delayed")):
        _made_up(FAULTS[name], recipe, (0,))(tmp_path / name)
        result = judge_folder(tmp_path / name / "curves").model_copy(update={"folder": "curves"})
        pages.append(describe_losses(result))
    assert [page.mark.tone.value for page in pages] == ["good", "bad", "missing"]
    assert "\n\n".join(map(render_terminal, pages)) == snapshot


def test_ablation(snapshot: SnapshotAssertion) -> None:
    files = sorted((EVIDENCE / "smoke" / "ablation").glob("*.json"))
    rows = tuple(FeatureAblation.model_validate_json(file.read_text()) for file in files)
    page = describe_ablation(AblationResult(tool="tool 1", features=rows))
    assert render_terminal(page) == snapshot


def test_policy(snapshot: SnapshotAssertion) -> None:
    names = ("production", "mamba-scan", "graphs-and-recompute")
    page = describe_policy(decide_policy(None, names))
    assert render_terminal(page) == snapshot


def test_history(snapshot: SnapshotAssertion) -> None:
    every = read_history(EVIDENCE / "h200").model_copy(update={"store": "h200"})
    some = read_history(EVIDENCE / "h200", ("*-imports",)).model_copy(update={"store": "h200"})
    pages = [render_terminal(describe_history(every)), render_terminal(describe_history(some, verbose=True))]
    assert "\n\n".join(pages) == snapshot


def _without_hashes(text: str) -> str:
    """The manifest of receipts that are made at every run."""
    return "\n".join(line for line in text.splitlines() if not line.startswith(("rules ", "receipts ")))
