"""Trainers on several ranks of gloo: plans reproduce one rank, evaluations change nothing, checkpoints fit worlds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.training.parallel.gloo_ranks import on_ranks
from tests.training.smoke.smoke_train import (
    DATA,
    EXPERTS,
    POSITIONS,
    alone,
    assert_follows,
    bounds,
    new_trainer,
    order_of,
    same_weights,
    train,
    train_all,
)

pytestmark = pytest.mark.thorough

PLANS = {"experts": EXPERTS, "sequences": DATA, "positions": POSITIONS}
TWICE = {"accumulate": 2}
FOUR = {"data": 4, "expert_parallel": 2}


def one_rank(**given: Any) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """What one rank comes to, and how far others may be off."""
    with alone():
        wanted = train(given)
        return wanted, bounds(given, wanted)


@pytest.fixture(scope="module")
def planned() -> list[list[dict[str, Any]]]:
    """Each plan in one pass and in two, on each rank; audited."""
    plans = [{**plan, **more} for more in ({}, TWICE) for plan in PLANS.values()]
    return on_ranks(2, train_all, [{"plan": plan, "audit": True} for plan in plans])


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("passes", [1, 2])
def test_every_plan_reproduces_one_rank(planned: list[list[dict[str, Any]]], kind: str, passes: int) -> None:
    wanted, most = one_rank(plan=TWICE if passes == 2 else {}, audit=True)
    place = list(PLANS).index(kind) + len(PLANS) * (passes - 1)
    first, second = planned[0][place], planned[1][place]
    assert first["losses"] == second["losses"]
    assert first["norms"] == second["norms"]
    assert_follows(first, wanted, most)
    # Parts of the model have the norm that they have on one rank: what is counted twice, or not, shows in its part.
    assert first["part_norms"].keys() == wanted["part_norms"].keys()
    for part, norms in wanted["part_norms"].items():
        # A part of the norm is a sum of some of its squares: no further off than all, in units of the whole.
        slack = [2 * bound * whole for bound, whole in zip(most["norms"], wanted["norms"], strict=True)]
        off = [abs(one - other) for one, other in zip(first["part_norms"][part], norms, strict=True)]
        assert all(one <= allowed for one, allowed in zip(off, slack, strict=True)), part
    assert first["lacking"] == second["lacking"] == []
    assert first["dispatches"] == 3 * passes
    # Experts over both ranks leave nothing that both hold; FSDP2 leaves the experts, and tensor groups a lot more.
    assert (first["replicas"] > 0) == (kind != "experts")


def saves_after_an_evaluation(folder: str) -> bool:
    """A checkpoint that is written while the blocks of FSDP2 are whole is that of another moment."""
    order = order_of(plan=DATA, steps=1, checkpoint_folder=folder, validate_every=1)
    trainer = new_trainer(order)
    trainer.run()
    trainer.save()  # the run ended with an evaluation
    weights = whole_weights(trainer)
    fresh = new_trainer(order_of(plan=DATA, steps=1, checkpoint_folder=folder, learning_rate=1.0))
    fresh.step()
    assert not same_weights(weights, whole_weights(fresh))
    fresh.resume()
    return same_weights(weights, whole_weights(fresh))


def whole_weights(trainer: Any) -> dict[str, Any]:
    """Every parameter with all its parts."""
    named = trainer.optimizer.parameters().items()
    return {name: (one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone() for name, one in named}


def test_a_checkpoint_behind_an_evaluation_is_whole(tmp_path: Path) -> None:
    assert on_ranks(2, saves_after_an_evaluation, str(tmp_path)) == [True, True]


def test_a_run_resumes_on_its_world_and_on_others(tmp_path: Path) -> None:
    """Two ranks train 2 of 4 steps and save; two, one and four go on."""
    given = {"steps": 4, "schedule_steps": 4, "plan": EXPERTS}
    saving = {"checkpoint_folder": str(tmp_path / "two"), "schedule_steps": 4}
    whole = on_ranks(2, train_all, [given, {**given, **saving, "steps": 2}])
    for world in (1, 4):
        shutil.copytree(tmp_path / "two", tmp_path / str(world))
    for again, (wanted, _) in zip(on_ranks(2, train, {**given, **saving, "resume": True}), whole, strict=True):
        assert again["resumed"] == 2
        assert again["losses"] == wanted["losses"][2:]
        assert again["norms"] == wanted["norms"][2:]
        assert same_weights(again["weights"], wanted["weights"])
    alone_whole, most = one_rank(steps=4)
    assert_follows(whole[0][0], alone_whole, most)
    for world, plan in ((1, {}), (4, FOUR)):
        order = {**given, "plan": plan, "checkpoint_folder": str(tmp_path / str(world)), "resume": True}
        for seen in on_ranks(world, train, order):
            assert seen["resumed"] == 2
            assert_follows(seen, alone_whole, most, first=2)
