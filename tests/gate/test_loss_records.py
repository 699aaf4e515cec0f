"""What allows no verdict, whatever the curves look like: each planted in curves that pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from megacpp_validate.gate.loss_folder import decide_curves

from megacpp_validate.evidence.loss_curve import FIRST_CURVE_SCHEMA_ID, HistorySeen, LossCurve, write_curve
from megacpp_validate.evidence.loss_curves import read_curve
from megacpp_validate.gate.loss import decide_loss
from megacpp_validate.gate.loss_observed import CASTS
from megacpp_validate.gate.loss_result import LossOutcome
from tests.gate.small_curves import LAYERS, MADE_WITH, as_recipe, make_casts, make_pairs

Curves = list[LossCurve]
Planted = Callable[[Curves, Curves], tuple[Curves, Curves]]


def as_first_schema(curve: LossCurve) -> LossCurve:
    """The curve as it was written before layers were looked at."""
    return replace(curve, schema_id=FIRST_CURVE_SCHEMA_ID, part_norms={}, quantizers=(), histories=(), made_with={})


def made(curve: LossCurve, **other: str) -> LossCurve:
    return replace(curve, made_with={**MADE_WITH, **other})


def say_nothing_of(curve: LossCurve, what: str) -> LossCurve:
    return replace(curve, made_with={key: value for key, value in MADE_WITH.items() if key != what})


REFUSED: dict[str, tuple[Planted, str]] = {
    "one BF16 run that cast": (
        lambda b, f: ([*b[:2], replace(b[2], quantizers=make_casts("current"))], f),
        "bf16 with seed 2 trained in low precision itself, casts in hybrid.layers.1.mixer",
    ),
    "BF16 runs with histories": (
        lambda b, f: ([replace(c, histories=(HistorySeen(2, 3, 0, 0, 0.0),)) for c in b], f),
        "bf16 with seed 0 trained in low precision itself, histories of amax were seen",
    ),
    "FP8 of the first schema": (
        lambda b, f: (b, [as_first_schema(c) for c in f]),
        "3 of 6 runs left no record of what their layers held, the first is the run of delayed with seed 0",
    ),
    "one BF16 of the first schema": (
        lambda b, f: ([as_first_schema(b[0]), *b[1:]], f),
        "1 of 6 runs left no record of what their layers held, the first is the run of bf16 with seed 0",
    ),
    "the first schema, with records": (
        lambda b, f: (b, [replace(c, schema_id=FIRST_CURVE_SCHEMA_ID) for c in f]),
        "3 of 6 runs left no record",
    ),
    "a recipe that is none": (
        lambda b, f: (b, [replace(c, recipe="fp8") for c in f]),
        "how 'fp8' casts is not known, but of delayed, current, block, mxfp8, nvfp4 alone",
    ),
    "a recipe in other letters": (lambda b, f: (b, [replace(c, recipe="Delayed") for c in f]), "'Delayed'"),
    "another GPU": (
        lambda b, f: (b, [made(c, gpu="another") for c in f]),
        "the runs had different gpu: another and made up",
    ),
    "another torch in one run": (lambda b, f: (b, [*f[:2], made(f[2], torch="9.8")]), "different torch: 9.8 and 9.9"),
    "another Transformer Engine": (
        lambda b, f: ([made(c, transformer_engine="9.8") for c in b], f),
        "different transformer_engine: 9.8 and 9.9",
    ),
    "something else on record": (
        lambda b, f: ([made(c, driver="1") for c in b], [made(c, driver="2") for c in f]),
        "different driver: 1 and 2",
    ),
    **{
        f"no {what} on record": (
            lambda b, f, what=what: (  # type: ignore[misc]
                [say_nothing_of(c, what) for c in b],
                [say_nothing_of(c, what) for c in f],
            ),
            f"bf16 with seed 0 does not say its {what}",
        )
        for what in MADE_WITH
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_curves_that_follow_are_refused_all_the_same(name: str) -> None:
    plant, said = REFUSED[name]
    verdict = decide_loss(*plant(*make_pairs()))
    assert verdict.outcome is LossOutcome.REFUSED
    assert any(said in refusal for refusal in verdict.refusals), verdict.refusals
    assert all("next step: " in refusal for refusal in verdict.refusals)


@pytest.mark.parametrize("recipe", CASTS)
def test_each_recipe_that_is_known_can_pass(recipe: str) -> None:
    bf16, fp8 = make_pairs()
    assert decide_loss(bf16, [as_recipe(curve, recipe) for curve in fp8]).outcome is LossOutcome.PASS


@pytest.mark.parametrize("recipe", sorted(CASTS.keys() - {"delayed"}))
def test_delayed_scaling_under_another_name_fails(recipe: str) -> None:
    bf16, fp8 = make_pairs()
    verdict = decide_loss(bf16, [replace(curve, recipe=recipe) for curve in fp8])
    assert {check.name for check in verdict.checks if not check.passed} == {
        f"observed.casts.{recipe}.seed{seed}" for seed in range(3)
    }


def put(folder: Path, curve: LossCurve) -> None:
    write_curve(curve, folder / f"cell.{curve.recipe}-{curve.seed}.curve")


def test_a_folder_of_the_first_schema_is_read_and_refused(tmp_path: Path) -> None:
    for curve in (*make_pairs()[0], *make_pairs()[1]):
        put(tmp_path, as_first_schema(curve))
    assert read_curve(tmp_path / "cell.delayed-1.curve") == as_first_schema(make_pairs()[1][1])
    (verdict,) = decide_curves(tmp_path)
    assert verdict.outcome is LossOutcome.REFUSED


def test_a_file_without_the_record_of_bf16_refuses_every_recipe(tmp_path: Path) -> None:
    """The second schema has the key, with nothing in it where no layer cast: that it is left out is not the same."""
    bf16, delayed = make_pairs()
    for curve in (*bf16, *delayed):
        put(tmp_path, curve)
    path = tmp_path / "cell.bf16-1.curve"
    text = path.read_text(encoding="utf-8")
    assert '"quantizers": [], ' in text
    path.write_text(text.replace('"quantizers": [], ', ""), encoding="utf-8")
    (verdict,) = decide_curves(tmp_path)
    assert verdict.outcome is LossOutcome.REFUSED
    assert "quantizers" in verdict.refusals[0]


@pytest.mark.parametrize("fewer", ["delayed", "current"])
def test_recipes_of_a_folder_are_held_to_the_same_layers(tmp_path: Path, fewer: str) -> None:
    bf16, delayed = make_pairs()
    for curve in (*bf16, *delayed, *(as_recipe(curve, "current") for curve in delayed)):
        layers = [layer for layer in LAYERS if layer != "hybrid.layers.2.up" or curve.recipe != fewer]
        kept = tuple(row for row in curve.quantizers if row.layer in layers)
        rows = tuple(replace(row, tensors=len(kept)) for row in curve.histories)
        put(tmp_path, replace(curve, quantizers=kept, histories=rows))
    assert {verdict.recipe: verdict.outcome for verdict in decide_curves(tmp_path)} == {
        one: LossOutcome.FAIL if one == fewer else LossOutcome.PASS for one in ("current", "delayed")
    }
