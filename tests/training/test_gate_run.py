"""What the loss gate trains on makes formats matter, and its curve says what a run did."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge.features import PRESETS, PRODUCTION  # noqa: E402
from megacpp_validate.evidence.loss_curve import curve_text, parse_curve  # noqa: E402
from megacpp_validate.training.gate_run import (  # noqa: E402
    FIRST_LEVEL,
    LAST_LEVEL,
    QUIET,
    SPIKE,
    SPIKE_STEP,
    GateData,
    GateModel,
    GateRun,
    GateTrainer,
    Lesson,
)
from megacpp_validate.training.layers import Build  # noqa: E402
from megacpp_validate.training.sizes import read_size  # noqa: E402

NATIVE = Build(PRESETS["off"])
TINY = read_size("tiny", aux_coefficient=0.0, z_coefficient=0.0)


def run(recipe: str = "bf16", **changes: Any) -> GateRun:
    made = GateRun(
        recipe, 0, steps=10, target="cpu", size="tiny", device="cpu", dtype=torch.float32, features=PRESETS["off"]
    )
    return replace(made, **changes)


def test_targets_are_the_next_letter_and_at_gauges_the_level() -> None:
    lesson = GateData(TINY).lesson(3)
    letters = torch.ones(TINY.length, dtype=torch.bool)
    letters[lesson.places] = False
    letters[-1] = False
    after = lesson.tokens.roll(-1, 1)
    assert torch.equal(lesson.targets[:, letters], after[:, letters])
    assert torch.equal(lesson.targets[:, lesson.places], lesson.levels - FIRST_LEVEL)
    assert lesson.levels.min() >= FIRST_LEVEL
    assert lesson.levels.max() <= LAST_LEVEL


def test_quiet_letters_learn_from_quiet_sequences_alone_and_from_little() -> None:
    """Both halves say the same and start alike, so their gradients are the same but for the weight."""
    model = GateModel(TINY, Build(PRESETS["off"], torch.float64), seed=0)
    lesson = GateData(TINY).lesson(0)
    half = TINY.batch // 2
    twins = Lesson(*(torch.cat([t[:half], t[:half]]) for t in (lesson.tokens, lesson.levels)), lesson.places,
                   torch.cat([lesson.targets[:half]] * 2))  # fmt: skip
    losses = model.losses(twins)
    losses["total"].backward()
    assert losses["loud"].item() == pytest.approx(losses["quiet"].item(), rel=1e-6)
    loud, quiet = model.hybrid.embedding.weight.grad, model.quiet.weight.grad
    assert quiet.norm().item() == pytest.approx(QUIET * loud.norm().item(), rel=1e-9)
    assert torch.allclose(quiet / QUIET, loud, rtol=1e-6, atol=1e-12)


def test_nothing_goes_around_the_lane() -> None:
    """What the neck does not let through does not reach the letters."""
    model = GateModel(TINY, NATIVE, seed=0)
    with torch.no_grad():
        model.lane.neck.weight.zero_()
    model.losses(GateData(TINY).lesson(0))["total"].backward()
    assert not model.hybrid.embedding.weight.grad.any()
    assert not model.quiet.weight.grad.any()
    assert model.lane.neck.weight.grad.any()


def test_a_run_leaves_a_whole_curve() -> None:
    curve = GateTrainer(run()).train()
    assert parse_curve(curve_text(curve)) == curve
    assert curve.steps == tuple(range(10))
    assert set(curve.part_losses) == {"loud", "quiet", "gauge"}
    assert set(curve.part_norms) == {"letters", "quiet", "lane", "norm", "head", *(f"layers.{n}" for n in range(5))}
    for step in range(10):
        whole = math.hypot(*(norms[step] for norms in curve.part_norms.values()))
        assert whole == pytest.approx(curve.gradient_norms[step], rel=1e-4)
    # The spike is in the gradients, not in the loss that is recorded.
    assert curve.gradient_norms[SPIKE_STEP] > SPIKE / 4 * curve.gradient_norms[SPIKE_STEP - 1]
    assert curve.losses[SPIKE_STEP] == pytest.approx(curve.losses[SPIKE_STEP - 1], abs=0.2)


def test_a_number_that_is_not_finite_ends_the_run_and_stays_in_the_curve() -> None:
    trainer = GateTrainer(run())
    assert trainer.step(0)
    with torch.no_grad():
        trainer.model.hybrid.head.weight.fill_(math.nan)
    curve = trainer.train()
    assert curve.planned == 10
    assert math.isnan(curve.losses[-1])
    assert len(curve.losses) == 2


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "block"])
def test_every_part_runs_on_transformer_engine(recipe: str) -> None:
    trainer = GateTrainer(run(recipe, features=PRODUCTION, dtype=torch.bfloat16, steps=10))
    native = {part for part, choice in trainer.model.choices().items() if choice.observed != "te"}
    curve = trainer.train()
    assert {part: c.observed for part, c in trainer.model.choices().items() if part not in native} == {
        part: "te" for part in trainer.model.choices() if part not in native
    }
    assert native <= {"layers.1.in_projection"}  # the width of `tiny` there is no multiple of 16
    assert len(curve.steps) == 10


def test_data_are_those_of_the_seed_of_the_data_and_weights_those_of_the_other() -> None:
    first, again, seed, data = (GateTrainer(run(**c)).train() for c in ({}, {}, {"seed": 1}, {"data_seed": 1}))
    assert first == again
    assert (first.data == seed.data, first.losses == seed.losses) == (True, False)
    assert first.data != data.data
