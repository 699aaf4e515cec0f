"""A task that ends well and compiled nothing, or nothing that a cache keeps, has not done what it is there for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megacpp_validate.catalog.prewarm import PrewarmTask
from megacpp_validate.jitcache.stack import Answer, asked_nothing, hold_to_purpose, run_tasks
from megacpp_validate.process import Processes
from tests.sealed_caches import KERNEL, TASK

OFF = {"TORCH_COMPILE_DISABLE": "1", "HOME": "/root", "TORCHINDUCTOR_CACHE_DIR": "/ours"}
CELL = TASK.model_copy(update={"code": "probe", "settings": {"probe": "attention"}})
LONGER = TASK.model_copy(update={"id": "fa4_d64", "seconds": 50})
KEPT = KERNEL.model_copy(update={"looked_for": "fwd/b282f513.o"})


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(), "compiled nothing for fa4, and looked for nothing"),
        (Answer(hits={"triton": 3}), "compiled nothing for fa4"),
        (Answer(compiled=(KEPT, KERNEL)), "is in no cache, since none was asked: fa4 fwd."),
        (Answer(compiled=(KERNEL,) * 6), "fa4 fwd and 2 more"),
        (Answer(compiled=(KEPT,)), ""),
        (Answer(hits={"fa4": 1}), ""),
    ],
)
def test_what_is_held_against_a_task(answer: Answer, said: str) -> None:
    held = hold_to_purpose(TASK, answer, OFF)
    assert said in held.failure
    assert bool(held.failure) is bool(said)
    if said:
        assert "set: TORCH_COMPILE_DISABLE)" in held.failure
        assert "set: none)" in hold_to_purpose(TASK, answer, {}).failure
    assert hold_to_purpose(CELL, answer, OFF) == answer, "of a cell nothing is known beforehand"


def test_of_the_drivers_cache_nobody_knows_what_it_had() -> None:
    task = TASK.model_copy(update={"library": "cuda", "code": "expert_rows"})
    assert hold_to_purpose(task, Answer(), OFF) == Answer()


@pytest.mark.parametrize("answer", [Answer(failure="it raised"), Answer(missing="no GPU")])
def test_what_did_not_end_well_keeps_its_own_reason(answer: Answer) -> None:
    assert hold_to_purpose(TASK, answer, OFF) == answer


def test_kernels_of_a_graph_are_tritons_or_the_graphs() -> None:
    task = TASK.model_copy(update={"library": "inductor"})
    assert not asked_nothing(task, Answer(hits={"triton": 1}))
    assert asked_nothing(task, Answer(hits={"fa4": 1}))
    assert not asked_nothing(task, Answer(hits=None)), "it counts nothing"


def test_side_by_side_and_those_that_train_alone() -> None:
    alone = PrewarmTask(
        id="smoke", library="inductor", code="smoke", targets=["h200"], gpu=True, settings={"cell": "x"}, seconds=99
    )
    begun: list[str] = []

    def run(task: PrewarmTask) -> Answer:
        begun.append(task.id)
        return Answer(seconds=float(task.seconds))

    longest = LONGER
    answers = run_tasks([TASK, alone, longest], run, 1, Processes())
    assert {task: answer.seconds for task, answer in answers.items()} == {TASK.id: 0.0, LONGER.id: 50.0, "smoke": 99.0}
    assert begun == [LONGER.id, TASK.id, "smoke"]


def test_a_full_disk_stops_the_others(tmp_path: Path) -> None:
    processes = Processes()

    def run(task: PrewarmTask) -> Answer:
        raise OSError(28, os.strerror(28), str(tmp_path))

    with pytest.raises(OSError, match="No space left"):
        run_tasks([TASK, LONGER], run, 1, processes)
    assert processes._stopped
