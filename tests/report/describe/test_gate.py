"""What the release gate and the policy of low precision say."""

from __future__ import annotations

import re
from pathlib import Path

from syrupy.assertion import SnapshotAssertion

from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.gate.fp8 import decide_policy
from megacpp_validate.gate.release_folder import GateOptions, decide_folder
from megacpp_validate.report.describe.gate import describe_gate, describe_policy
from megacpp_validate.report.render.terminal import render_terminal
from tests.replay.gate import copy_matrix, write_waiver
from tests.replay.receipts import AT, CODE, STACK, TARGET, fill, good, put, red


def test_release_gate(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    options = GateOptions(fill(tmp_path / "store"), "te-upgrade", AT, TARGET, STACK, accept_code=(CODE,), unsigned=True)
    put(tmp_path / "store", good("attention", retries=["node-fail: the node was lost (node n3)"]))
    pages = [describe_gate(decide_folder(read_catalog(), options))]
    put(tmp_path / "store", red("permute"), run=".")
    put(tmp_path / "store", red("attention", hours=0.5))
    (tmp_path / "store" / "run" / f"{STACK}-{TARGET}-layer_spec.json").unlink()
    copy_matrix(tmp_path)
    write_waiver(tmp_path / "matrix", "outcome", "2026-11-21", f"{STACK}-{TARGET}-attention")
    pages.append(describe_gate(decide_folder(read_catalog(tmp_path / "matrix"), options)))
    assert [page.mark.tone.value for page in pages] == ["good", "bad"]
    text = "\n\n".join(render_terminal(page, verbose=True) for page in pages)
    assert _without_hashes(text) == snapshot


def test_policy(snapshot: SnapshotAssertion) -> None:
    names = ("production", "mamba-scan", "graphs-and-recompute")
    page = describe_policy(decide_policy(read_catalog(), names))
    assert render_terminal(page) == snapshot


def _without_hashes(text: str) -> str:
    """Without the manifests of rules and of receipts that are made at every run, and what wraps of them."""
    return re.sub(r"(?m)^(rules|receipts) sha256.*\n(\s*[0-9a-f]{1,4}\s*\n)?", "", text)
