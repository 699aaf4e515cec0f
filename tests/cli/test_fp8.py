"""The verb of FP8: it runs, it ends with the code of its class, and nothing that is lacking is told as green."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import matrix_folder
from megacpp_validate.catalog.policies import PRESETS
from megacpp_validate.evidence.loss_curve import write_curve
from tests.cli.session_calls import Stack, make_session, make_stack
from tests.command_line import Run, Said
from tests.gate.small_curves import as_recipe, make_pairs

OPEN, CLOSED, WRONG, NOTHING, MISSING, NO_ENVIRONMENT, INFRASTRUCTURE = 0, 1, 2, 3, 4, 5, 6
CELL = "te2.17.1-h200-fp8_loss"


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`fp8` in this process, on a host with no GPU, in a folder of the test's own."""
    return make_session("fp8", capfd, monkeypatch, tmp_path)


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """The host's interpreter sees an H200 and Transformer Engine 2.17.1; its probes do what a test says."""
    return make_stack(tmp_path, monkeypatch)


@pytest.fixture
def curves(tmp_path: Path) -> Path:
    """A folder of curves of training that is good, which a probe may leave."""
    folder = tmp_path / "trained"
    folder.mkdir()
    bf16, delayed = make_pairs()
    for curve in (*bf16, *delayed, *(as_recipe(curve, "current") for curve in delayed)):
        write_curve(curve, folder / f"{CELL}.{curve.recipe}-{curve.seed}.curve")
    return folder


def leave(curves: Path, *recipes: str) -> str:
    """Words of a probe that leaves the curves of these recipes, or of all, beside its receipt, as training does."""
    left = [str(curve) for recipe in recipes or ("*",) for curve in curves.glob(f"*.{recipe}-*")]
    copy = f"[shutil.copy(curve, os.path.dirname(place)) for curve in {left}]"
    return f"import shutil\nif order['probe'] == 'fp8_loss': {copy}\nwrite()"


def test_a_session_that_is_good_is_open(run: Run, stack: Stack, curves: Path) -> None:
    stack(leave(curves))
    said = run("--format", "json")
    assert said.code == OPEN, said.out + said.err
    assert [row["recipe"] for row in json.loads(said.out)["loss"]] == ["current", "delayed"]


def tell_everywhere(run: Run, *arguments: str) -> dict[str, Said]:
    return {form: run(*arguments, "--format", form) for form in ("table", "junit", "github", "markdown", "html")}


def test_training_without_curves_is_open_in_no_form(run: Run, stack: Stack) -> None:
    stack("write()")
    told = tell_everywhere(run, "--probes", "loss")
    for said in told.values():
        assert said.code == MISSING
        assert "left no curve" in said.out
    assert "<skipped" in told["junit"].out
    assert "::warning" in told["github"].out


def test_presets_that_the_policy_refuses_close_it_in_every_form(run: Run, stack: Stack, tmp_path: Path) -> None:
    matrix = Path(shutil.copytree(matrix_folder(), tmp_path / "matrix"))
    presets = matrix / PRESETS
    presets.write_text(presets.read_text().replace("bf16_first = 1", "bf16_first = 0", 1))
    stack("write()")
    told = tell_everywhere(run, "--probes", "delayed", "--matrix", str(matrix))
    for said in told.values():
        assert said.code == CLOSED
        assert "The FP8 policy and its presets disagree" in said.flat
    assert "<failure" in told["junit"].out
