"""Which recipe a target gets, what it refuses, and that the rows of the bridge are those of the matrix."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from megacpp_validate.bridge import recipes
from megacpp_validate.bridge.errors import UnknownName, WrongTarget
from megacpp_validate.bridge.recipes import TARGETS, detect_target, recipe_for

MATRIX = Path(__file__).resolve().parents[2] / "matrix" / "targets.toml"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Pretend that torch sees this GPU."""

    def pretend(arch: str) -> None:
        monkeypatch.setattr(recipes, "_present_arch", lambda: arch)

    return pretend


def test_the_rows_are_those_of_the_matrix() -> None:
    rows = tomllib.loads(MATRIX.read_text(encoding="utf-8"))["target"]
    wanted = {row["id"]: (row["arch"], tuple(row["recipes"]), row.get("production_recipe") or None) for row in rows}
    assert {row.id: (row.arch, row.recipes, row.production) for row in TARGETS.values()} == wanted
    assert list(TARGETS) == [row["id"] for row in rows]


@pytest.mark.parametrize(
    ("arch", "target", "name", "wanted"),
    [
        ("sm_90", "h200", None, "delayed"),
        ("sm_90", "sm_90", None, "delayed"),
        ("sm_90", "h200", "block", "block"),
        ("sm_100", "b200", None, "mxfp8"),
        ("sm_100", "b200", "delayed", "delayed"),
        ("sm_121", "gb10", None, None),
        ("", "cpu", None, None),
        ("sm_90", "cpu", None, None),  # the native paths on a GPU host
    ],
)
def test_the_recipe_follows_the_target(gpu, arch: str, target: str, name: str | None, wanted: str | None) -> None:
    gpu(arch)
    assert recipe_for(target, name) == wanted


@pytest.mark.parametrize(
    ("arch", "target", "name", "error", "words"),
    [
        ("sm_90", "h200", "mxfp8", WrongTarget, ("b200 has it", "take one of delayed, current, block")),
        ("sm_90", "b200", None, WrongTarget, ("b200 wants sm_100", "this GPU is sm_90")),
        ("", "h200", None, WrongTarget, ("sees no CUDA device",)),
        ("", "cpu", "delayed", WrongTarget, ("cpu has no recipe delayed", "h200 and b200 have it", "stay in bf16")),
        ("sm_121", "gb10", "delayed", WrongTarget, ("gb10 (sm_121)", "stay in bf16")),
        ("sm_90", "h100", None, UnknownName, ("'h100'", "h200, b200, gb10, cpu", "sm_90, sm_100, sm_121")),
        ("sm_90", "", None, UnknownName, ("''",)),
        ("sm_90", "h200", "fp8", UnknownName, ("'fp8'", "delayed, current, block, mxfp8, nvfp4")),
        ("", "h200", "fp8", UnknownName, ("'fp8'",)),
        ("sm_90", "h200", "", UnknownName, ("''",)),
    ],
)
def test_what_is_refused(gpu, arch: str, target: str, name: str | None, error: type, words: tuple[str, ...]) -> None:
    gpu(arch)
    with pytest.raises(error) as refusal:
        recipe_for(target, name)
    text = str(refusal.value)
    assert "Next step" in text
    for word in words:
        assert word in text


def test_a_gpu_that_is_no_target_is_refused(gpu) -> None:
    gpu("sm_80")
    with pytest.raises(WrongTarget, match=r"sm_80.*Next step: run on one of h200 \(sm_90\)"):
        detect_target()
