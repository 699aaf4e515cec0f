"""On the CPU all of it is real: TorchInductor compiles C++, the cache is sealed, carried, and found warm, or not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import matrix_folder
from megacpp_validate.errors import Exit
from megacpp_validate.jitcache.prewarm import PrewarmResult
from megacpp_validate.jitcache.stack import JitVerdict
from megacpp_validate.jitcache.verify import JitVerifyResult
from tests.replay.harness import Ended, call
from tests.sealed_caches import small_disk

pytest.importorskip("torch", reason="not-run: there is no torch here")
_NO_COMPILER = not any(map(shutil.which, ("g++", "c++", "clang++")))
pytestmark = [pytest.mark.skipif(_NO_COMPILER, reason="not-run: there is no C++ compiler here"), pytest.mark.thorough]
TASKS = """
[[task]]
id = "norm"
library = "inductor"
code = "inductor_cpu"
targets = ["cpu"]
gpu = false
settings = {{ rows = "{rows}", width = "16" }}

[[task]]
id = "wide"
library = "inductor"
code = "inductor_cpu"
targets = ["cpu"]
gpu = false
settings = {{ rows = "8", width = "32" }}
"""


def _matrix(folder: Path, rows: int = 8) -> Path:
    """The project's matrix with two small tasks."""
    shutil.copytree(matrix_folder(), folder)
    keys = (folder / "prewarm.toml").read_text(encoding="utf-8").partition("[keys]")[2]
    (folder / "prewarm.toml").write_text(f"{TASKS.format(rows=rows)}\n[keys]{keys}", encoding="utf-8")
    return folder


def _ask(*words: object) -> Ended:
    return call(map(str, (*words, "--format", "json")), Path())


def _verify(root: Path, matrix: Path, receipts: Path) -> tuple[int, JitVerifyResult]:
    ended = _ask("jit-verify", "--target", "cpu", "--root", root, "--matrix", matrix, "--receipts", receipts)
    result = JitVerifyResult.model_validate_json((receipts / "jit_verify-cpu.json").read_bytes())
    assert ended.data == result.model_dump(mode="json")
    return ended.code, result


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _matrix(tmp_path_factory.mktemp("matrix") / "matrix")


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory, matrix: Path) -> Path:
    """A root that is prewarmed by the first test."""
    return tmp_path_factory.mktemp("root")


def test_a_prewarm_is_found_warm(warm: Path, matrix: Path, tmp_path: Path) -> None:
    words = ("prewarm", "--target", "cpu", "--root", warm, "--matrix", matrix, "--receipts", tmp_path / "r")
    ended = _ask(*words)
    assert ended.code == Exit.OPEN, ended
    result = PrewarmResult.model_validate(ended.data)
    assert all(row.compiled for row in result.rows)
    assert result.sealed
    assert result.verdict is not None
    assert {row.verdict for row in result.verdict.rows} == {JitVerdict.WARM}
    assert [*result.caches] == ["inductor"]
    ended = _ask(*words)
    again = PrewarmResult.model_validate(ended.data)
    assert (ended.code, again.manifest) == (Exit.OPEN, result.manifest)
    assert again.verdict is not None
    assert (again.rows, again.verdict.exit) == ((), Exit.OPEN)
    code, verdict = _verify(warm, matrix, tmp_path / "receipts")
    assert code == Exit.OPEN, verdict
    assert verdict.manifest == result.manifest
    assert all(row.hits for row in verdict.rows), "what is warm was looked for, and found"


def test_a_shape_that_was_not_warmed_is_named(warm: Path, tmp_path: Path) -> None:
    code, verdict = _verify(warm, _matrix(tmp_path / "matrix", rows=24), tmp_path / "receipts")
    assert code == Exit.CLOSED
    by_task = {row.task: row for row in verdict.rows}
    assert by_task["wide"].verdict is JitVerdict.WARM
    cold = by_task["norm"]
    assert cold.verdict is JitVerdict.COMPILED
    assert {one.library for one in cold.compiled} == {"inductor"}
    assert any("24,16" in one.shape for one in cold.compiled), cold.compiled
    assert any("8,16" in line for line in cold.known), cold.known


def test_carried_to_another_folder_it_is_warm(warm: Path, matrix: Path, tmp_path: Path) -> None:
    ended = _ask("jit-cache", "export", tmp_path / "jit.tar.gz", "--root", warm)
    assert ended.code == Exit.OPEN, ended
    away = warm.with_name(f"{warm.name}-away")
    warm.rename(away)  # nothing may be found by its old path
    try:
        ended = _ask("jit-cache", "import", tmp_path / "jit.tar.gz", "--root", tmp_path / "two")
        assert ended.code == Exit.OPEN, ended
        code, verdict = _verify(tmp_path / "two", matrix, tmp_path / "receipts")
        assert code == Exit.OPEN, verdict
    finally:
        away.rename(warm)


def test_a_disk_that_gets_full_in_the_middle(matrix: Path) -> None:
    with small_disk("800k") as disk:  # TorchInductor keeps 1.06 MB of these two
        ended = _ask("prewarm", "--target", "cpu", "--root", disk, "--matrix", matrix)
        assert ended.code == Exit.INFRASTRUCTURE, ended
        assert not (disk / "cpu" / "manifest.sha256").exists()
