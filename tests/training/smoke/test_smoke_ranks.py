"""Trainers on several ranks of gloo: plans reproduce one rank, evaluations change nothing, checkpoints fit worlds."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from megacpp_validate.training.errors import TrainingError
from megacpp_validate.training.optimizer import GradientSums
from megacpp_validate.training.parallel.checkpoint import CheckpointNotSaved, WrongCheckpoint
from megacpp_validate.training.parallel.plan import WrongPlan
from tests.training.parallel.gloo_ranks import on_ranks
from tests.training.smoke.smoke_train import (
    CHANGES,
    DATA,
    EXPERTS,
    HEADS,
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

PLANS = {"experts": EXPERTS, "sequences": DATA, "positions": POSITIONS, "heads": HEADS}
TWICE = {"accumulate": 2}
FOUR = {"world": 4, "data": 4, "expert_parallel": 2}


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


def test_the_way_to_the_experts_that_waits_for_nothing_reproduces_one_rank() -> None:
    given = {"forms": {"moe": "jagged"}, "audit": True}
    wanted, most = one_rank(**given)
    for seen in on_ranks(2, train, {**given, "plan": EXPERTS}):
        assert_follows(seen, wanted, most)
        assert seen["dispatches"] == 3
        assert seen["lacking"] == []


def with_faults() -> dict[str, Any]:
    """What a plan gives with sums that are wrong."""
    seen = {}
    for fault in ("none", "counted twice", "left out"):
        trainer = new_trainer(order_of(plan=DATA, steps=1))
        sums = trainer.sharded.sums
        if fault == "counted twice":  # what is held by both ranks counts as one rank's
            trainer.optimizer.sums = GradientSums(sums.sums, {})
        elif fault == "left out":
            trainer.optimizer.sums = GradientSums(sums.sums[:-1], sums.copies)
        trainer.run()
        seen[fault] = {"losses": [trainer.records[0].loss], "norms": [trainer.records[0].grad_norm]}
    return seen


def test_a_part_that_is_counted_twice_or_not_summed_is_seen() -> None:
    wanted, most = one_rank(steps=1)
    for seen in on_ranks(2, with_faults):
        assert_follows(seen["none"], wanted, most)
        for fault in ("counted twice", "left out"):
            assert abs(seen[fault]["norms"][0] / wanted["norms"][0] - 1) > 1e6 * most["norms"][0], fault


def test_evaluation_changes_nothing_where_parameters_are_shared_out() -> None:
    given = {"precision": "fp32", "plan": DATA, "steps": 4}
    for plain, validated in on_ranks(2, train_all, [given, {**given, "validate_every": 1}]):
        assert plain["losses"] == validated["losses"]
        assert plain["norms"] == validated["norms"]
        assert same_weights(plain["weights"], validated["weights"])
        assert list(validated["validation"]) == [0, 1, 2, 3, 4]


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
        assert again["resumed"] == (2, 2)
        assert again["losses"] == wanted["losses"][2:]
        assert again["norms"] == wanted["norms"][2:]
        assert same_weights(again["weights"], wanted["weights"])
    alone_whole, most = one_rank(steps=4)
    assert_follows(whole[0][0], alone_whole, most)
    for world, plan in ((1, {}), (4, FOUR)):
        order = {**given, "plan": plan, "checkpoint_folder": str(tmp_path / str(world)), "resume": True}
        for seen in on_ranks(world, train, order):
            assert seen["resumed"] == (2, 2)
            assert_follows(seen, alone_whole, most, first=2)


def refusals(folder: str, spoiled: str) -> list[str]:
    """What is said of checkpoints that cannot be taken."""
    said = []
    for given in (
        {"checkpoint_folder": folder, "changes": {**CHANGES, "pattern": "AMEAA"}},
        {"checkpoint_folder": spoiled},
    ):
        with pytest.raises(WrongCheckpoint) as caught:
            train({"plan": EXPERTS, "resume": True, **given})
        said.append(str(caught.value))
    return said


def test_checkpoints_of_another_pattern_or_cut_short_are_refused_on_all_ranks(tmp_path: Path) -> None:
    fine, spoiled = tmp_path / "fine", tmp_path / "spoiled"
    on_ranks(2, train, {"plan": EXPERTS, "steps": 1, "checkpoint_folder": str(fine)})
    shutil.copytree(fine, spoiled)
    (part,) = spoiled.glob("step-*/__1_0.distcp")
    os.truncate(part, part.stat().st_size - 1)
    first, second = on_ranks(2, refusals, str(fine), str(spoiled))
    assert first == second
    assert "pattern is AMEAR in the checkpoint and AMEAA here" in first[0]
    assert "__1_0.distcp has" in first[1]


def saves_on_a_full_disk(folder: str) -> tuple[str, int]:
    """The disk of rank 1 is full at the second save."""
    trainer = new_trainer(order_of(plan=EXPERTS, checkpoint_folder=folder, checkpoint_every=1))
    trainer.step()
    trainer.save()
    trainer.step()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if distributed.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    with pytest.raises(CheckpointNotSaved) as caught:
        trainer.save()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    trainer.step()  # training can go on
    return str(caught.value), trainer.resume().step


def test_the_one_before_survives_a_full_disk(tmp_path: Path) -> None:
    for said, step in on_ranks(2, saves_on_a_full_disk, str(tmp_path)):
        assert "not saved: rank 1: " in said
        assert "the disk is full" in said
        assert step == 1


def saves_apart(folder: str) -> list[str]:
    """Each rank has a folder of its own; and a plan of another world."""
    trainer = new_trainer(order_of(plan=EXPERTS, checkpoint_folder=f"{folder}/{distributed.get_rank()}"))
    trainer.step()
    with pytest.raises(TrainingError) as caught:
        trainer.save()
    with pytest.raises(WrongPlan) as other:
        new_trainer(order_of())
    return [str(caught.value), str(other.value)]


def test_a_folder_that_ranks_do_not_share_and_a_world_of_another_size_are_told(tmp_path: Path) -> None:
    for apart, world in on_ranks(2, saves_apart, str(tmp_path)):
        assert "does not see __1_0.distcp" in apart
        assert "is no folder that all hosts share" in apart
        assert "the plan is of 1 rank(s), and 2 were started" in world
    assert not list((tmp_path / "0").glob("step-*"))
