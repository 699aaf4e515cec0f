"""FlashAttention 4 and Triton compiled for a GPU that is not there, sealed, carried to another folder, and found.

`MEGACPP_TEST_FA4_PYTHON` names an interpreter with torch, flash-attn-4, nvidia-cutlass-dsl, quack-kernels and triton.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megacpp_validate.errors import Exit
from megacpp_validate.jitcache import cache
from megacpp_validate.jitcache.prewarm import PrewarmResult
from megacpp_validate.jitcache.verify import JitCause, JitVerdict, JitVerifyResult
from tests.jitcache.asking import ask

PYTHON = os.environ.get("MEGACPP_TEST_FA4_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="not-run: MEGACPP_TEST_FA4_PYTHON names no interpreter with FA4"),
    pytest.mark.thorough,
]
TASKS = "fa4_d64,triton_rotation"


def _ask(verb: str, target: str, root: Path, *words: object) -> tuple[int, str]:
    common = ["--target", target, "--at-build", "--python", PYTHON, "--root", root, "--tasks", TASKS]
    code, text = ask(verb, *common, *words, "--format", "json")
    return code, text[text.find("{") :]


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sealed caches of h200 and b200, below another root than the one that they were made in, which is gone."""
    made, root = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("carried")
    for target in ("h200", "b200"):
        code, text = _ask("prewarm", target, made)
        assert code == Exit.OPEN, text
        assert PrewarmResult.model_validate_json(text).sealed
    for arch in ("sm_90a", "sm_100a"):
        place = root.with_name(f"{arch}.tar")
        for words in (("export", place, "--root", made), ("import", place, "--root", root)):
            code, text = ask("jit-cache", *words, "--arch", arch)
            assert code == Exit.OPEN, text
    made.rename(made.with_name("made-and-gone"))
    return root


@pytest.mark.parametrize("target", ["h200", "b200"])
def test_found_without_a_compile(carried: Path, tmp_path: Path, target: str) -> None:
    code, text = _ask("jit-verify", target, carried, "--receipts", tmp_path)
    result = JitVerifyResult.model_validate_json(text)
    assert code == Exit.OPEN, text
    assert all(row.hits for row in result.rows)


def test_where_paths_are_not_moved_triton_compiles_again(
    carried: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that a working copy is there for, planted."""
    monkeypatch.setattr(cache, "_relocate", lambda *_: None)
    code, text = _ask("jit-verify", "h200", carried, "--receipts", tmp_path)
    assert code == Exit.CLOSED, text
    rows = {row.task: row for row in JitVerifyResult.model_validate_json(text).rows}
    assert rows["fa4_d64"].verdict is JitVerdict.WARM
    assert rows["triton_rotation"].cause is JitCause.OTHER_KEY
    assert {one.library for one in rows["triton_rotation"].compiled} == {"triton"}
