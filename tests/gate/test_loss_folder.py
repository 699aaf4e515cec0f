"""A folder of curves: judged a cell at a time, and what cannot be read is lost, not passed; the verb's exit codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megacpp_validate.cli.app import Format, app
from megacpp_validate.evidence.loss_curve import LossCurve, write_curve
from megacpp_validate.evidence.loss_curve_folder import NoFolder
from megacpp_validate.gate.loss_folder import decide_curves
from megacpp_validate.gate.loss_result import LossGateResult, LossOutcome
from tests.gate.small_curves import as_recipe, cut_to, make_pairs

CELL = "te2.20.2-h200-fp8_loss"


def put(folder: Path, curve: LossCurve, cell: str = CELL, name: str = "") -> Path:
    path = folder / f"{cell}.{name or f'{curve.recipe}-{curve.seed}'}.curve"
    write_curve(curve, path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bf16, delayed = make_pairs()
    for curve in (*bf16, *delayed, *(as_recipe(curve, "current") for curve in delayed)):
        put(tmp_path, curve)
    (tmp_path / f"{CELL}.json").write_text("{}")  # the receipt is not the gate's
    return tmp_path


def outcomes(folder: Path) -> dict[str, LossOutcome]:
    return {verdict.recipe: verdict.outcome for verdict in decide_curves(folder)}


def test_each_recipe_of_each_cell_has_a_verdict(folder: Path) -> None:
    other = "te2.12.0-h200-fp8_loss"
    for curves in make_pairs():
        for curve in curves:
            put(folder, curve, other)
    verdicts = decide_curves(folder)
    assert [(verdict.of, verdict.recipe) for verdict in verdicts] == [
        (other, "delayed"), (CELL, "current"), (CELL, "delayed"),
    ]  # fmt: skip
    assert {verdict.outcome for verdict in verdicts} == {LossOutcome.PASS}


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def rename(path: Path) -> None:
    path.rename(path.with_name(f"{CELL}.delayed-7.curve"))


@pytest.mark.parametrize("damage", [cut_short, rename, Path.unlink])
def test_a_run_that_is_lost_refuses_its_recipe(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder / f"{CELL}.delayed-1.curve")
    assert outcomes(folder) == {"current": LossOutcome.PASS, "delayed": LossOutcome.REFUSED}


@pytest.mark.parametrize("damage", [cut_short, Path.unlink])
def test_a_run_of_bf16_that_is_lost_refuses_every_recipe(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder / f"{CELL}.bf16-1.curve")
    assert outcomes(folder) == {"current": LossOutcome.REFUSED, "delayed": LossOutcome.REFUSED}


def test_bf16_alone_is_refused(folder: Path) -> None:
    for path in (*folder.glob("*current*"), *folder.glob("*delayed*")):
        path.unlink()
    (verdict,) = decide_curves(folder)
    assert (verdict.outcome, verdict.recipe) == (LossOutcome.REFUSED, "")


def call(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["loss-gate", *arguments])
    return done.exit_code, done.output


def leave(_: Path) -> None:
    """As it is."""


def drop_steps(folder: Path) -> None:
    _, delayed = make_pairs()
    put(folder, cut_to(delayed[1], 90))


def change_data(folder: Path) -> None:
    _, delayed = make_pairs()
    put(folder, replace(delayed[1], data="b" * 64))


def empty(folder: Path) -> None:
    for path in folder.glob("*.curve"):
        path.unlink()


@pytest.mark.parametrize(
    ("change", "code"),
    [(leave, 0), (drop_steps, 1), (change_data, 4), (empty, 4)],
    ids=lambda v: getattr(v, "__name__", v),
)
@pytest.mark.parametrize("fmt", list(Format))
def test_the_verb_ends_with_the_code_of_its_class(
    folder: Path, change: Callable[[Path], None], code: int, fmt: Format
) -> None:
    change(folder)
    ended, said = call(str(folder), "--format", fmt.value)
    assert ended == code
    assert said.strip()
    if fmt is Format.JSON:
        result = LossGateResult.model_validate_json(said)
        assert (result.holds, result.breaks) == (code == 0, code == 1)


def test_a_folder_that_is_not_there_is_a_wrong_argument(tmp_path: Path) -> None:
    ended, _ = call(str(tmp_path / "nothing"))
    assert ended == 2
    with pytest.raises(NoFolder, match=r"is no folder.*Next step"):
        decide_curves(tmp_path / "nothing")


def test_the_page_draws_every_recipe_and_says_what_failed(folder: Path) -> None:
    drop_steps(folder)
    _, page = call(str(folder), "--format", "html")
    assert page.count("<svg") == 2
    assert "10 of 100 steps are missing" in page
