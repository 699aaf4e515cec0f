"""What the loss gate trains on makes formats matter, and its curve says what a run did."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge.features import PRESETS  # noqa: E402
from megacpp_validate.evidence.loss_curve import curve_text, parse_curve  # noqa: E402
from megacpp_validate.training.language import Language  # noqa: E402
from megacpp_validate.training.layers import Build  # noqa: E402
from megacpp_validate.training.parallel.checks import NotFinite  # noqa: E402
from megacpp_validate.training.parallel.goodput import Ledger  # noqa: E402
from megacpp_validate.training.parallel.ranks import Rank  # noqa: E402
from megacpp_validate.training.sizes import read_size  # noqa: E402
from megacpp_validate.training.smoke.gate import (  # noqa: E402
    FIRST_LEVEL,
    LAST_LEVEL,
    QUIET,
    SPIKE,
    SPIKE_STEP,
    GateModel,
    GateTrainer,
    Lesson,
    make_lesson,
)
from megacpp_validate.training.smoke.order import SmokeOrder  # noqa: E402

NATIVE = Build(PRESETS["off"])
TINY = read_size("tiny", aux_coefficient=0.0, z_coefficient=0.0)


def lesson_of(step: int) -> Lesson:
    read = Language(TINY.grammar, seed=0).batch(step, TINY.batch, TINY.length + 1)
    return make_lesson(read, step, seed=0)


def new_trainer(**changes: Any) -> GateTrainer:
    given = {"precision": "fp32", "features": {"preset": "off"}, "learning_rate": 1e-3, "eps": 1e-15, **changes}
    order = SmokeOrder(task="gate", steps=10, warm_up=1, **given)
    return GateTrainer(order, Rank(), Ledger(began_ns=time.monotonic_ns()))


def test_targets_are_the_next_letter_and_at_gauges_the_level() -> None:
    lesson = lesson_of(3)
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
    lesson = lesson_of(0)
    half = TINY.batch // 2
    twins = Lesson(*(torch.cat([t[:half], t[:half]]) for t in (lesson.tokens, lesson.levels)), lesson.places,
                   torch.cat([lesson.targets[:half]] * 2), lesson.spike)  # fmt: skip
    model.losses(twins).total.backward()
    assert model.part_losses["loud"].item() == pytest.approx(model.part_losses["quiet"].item(), rel=1e-6)
    loud, quiet = model.embedding.weight.grad, model.quiet.weight.grad
    assert quiet.norm().item() == pytest.approx(QUIET * loud.norm().item(), rel=1e-9)
    assert torch.allclose(quiet / QUIET, loud, rtol=1e-6, atol=1e-12)


def test_nothing_goes_around_the_lane() -> None:
    """What the neck does not let through does not reach the letters."""
    model = GateModel(TINY, NATIVE, seed=0)
    with torch.no_grad():
        model.lane.neck.weight.zero_()
    model.losses(lesson_of(0)).total.backward()
    assert not model.embedding.weight.grad.any()
    assert not model.quiet.weight.grad.any()
    assert model.lane.neck.weight.grad.any()


def test_a_run_leaves_a_whole_curve() -> None:
    trainer = new_trainer()
    trainer.run()
    curve = trainer.curve()
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
    trainer = new_trainer()
    trainer.step()
    with torch.no_grad():
        trainer.model.head.weight.fill_(math.nan)
    with pytest.raises(NotFinite):
        trainer.run()
    curve = parse_curve(curve_text(trainer.curve()))
    assert curve.planned == 10
    assert math.isnan(curve.losses[-1])
    assert len(curve.losses) == 2


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "block"])
def test_every_part_runs_on_transformer_engine(recipe: str) -> None:
    trainer = new_trainer(precision=recipe, features={})
    native = {part for part, choice in trainer.model.choices().items() if choice.observed != "te"}
    trainer.run()
    assert {part: c.observed for part, c in trainer.model.choices().items() if part not in native} == {
        part: "te" for part in trainer.model.choices() if part not in native
    }
    assert native <= {"layers.1.in_projection"}  # the width of `tiny` there is no multiple of 16
    assert len(trainer.curve().steps) == 10


def test_data_are_those_of_the_seed_of_the_data_and_weights_those_of_the_other() -> None:
    curves = []
    for changes in ({}, {}, {"seed": 1}, {"data_seed": 1}):
        trainer = new_trainer(**changes)
        trainer.run()
        curves.append(trainer.curve())
    first, again, seed, data = curves
    assert first == again
    assert (first.data == seed.data, first.losses == seed.losses) == (True, False)
    assert first.data != data.data
