"""What a task answers, and what is held against one that ends well and compiled nothing."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.catalog.prewarm import PrewarmTask, read_prewarm
from megacpp_validate.errors import Exit
from megacpp_validate.evidence.receipt import JitCompile as Told
from megacpp_validate.evidence.receipt import JitCompiles, Outcome, Receipt
from megacpp_validate.jitcache.stack import (
    Answer,
    JitOptions,
    read_answer,
    read_receipt_answer,
    require_purpose,
    run_tasks,
    select_tasks,
)
from megacpp_validate.process import Processes
from tests.replay.harness import call
from tests.sealed_caches import KERNEL, TASK

CELL = TASK.model_copy(update={"code": "probe", "settings": {"probe": "attention"}})
LONGER = TASK.model_copy(update={"id": "fa4_d64", "seconds": 50})
DRIVER = TASK.model_copy(update={"library": "cuda", "code": "expert_rows"})


@pytest.mark.parametrize(
    ("task", "answer", "said"),
    [
        (TASK, Answer(), "compiled nothing for fa4, and looked for nothing"),
        (TASK, Answer(compiled=(KERNEL,)), ""),
        (TASK, Answer(hits={"fa4": 1}), ""),
        (CELL, Answer(), ""),  # of a cell nothing is known beforehand
        (DRIVER, Answer(), ""),  # nobody knows what the driver's cache had
        (TASK, Answer(missing="no GPU"), ""),
    ],
)
def test_what_is_held_against_a_task(task: PrewarmTask, answer: Answer, said: str) -> None:
    held = require_purpose(task, answer)
    assert (said in held.failure, bool(held.failure)) == (True, bool(said))


@pytest.mark.parametrize(
    ("names", "ranks", "at_build"),
    [((), 1, False), ((), 4, False), (("fa4_d64", "triton_rotation"), 1, False), ((), 1, True)],
)
def test_what_the_caller_leaves_out_is_named(
    catalog: Catalog, names: tuple[str, ...], ranks: int, at_build: bool
) -> None:
    options = JitOptions(names, target="h200", ranks=ranks, at_build=at_build)
    selected = select_tasks(read_prewarm(catalog).task, "h200", options)
    covered, every = {task.id for task in selected.tasks}, {task.id for task in selected.of_target}
    fit = {task.id for task in selected.of_target if task.ranks <= ranks and not (at_build and task.gpu)}
    assert covered == (set(names) if names else fit)
    assert {line.partition(":")[0] for line in selected.left_out} == every - covered


def test_compile_only_takes_any_machine_and_keeps_nothing() -> None:
    """A GB10 has another CPU than this machine; without Triton the kernels do not compile, and nothing is proven."""
    words = ("--target", "gb10", "--compile-only", "--tasks", "triton_rotation", "--python", sys.executable)
    ended = call(("prewarm", *words, "--format", "json"), Path())
    assert (ended.data["folder"], ended.data["sealed"]) == ("", False)
    (row,) = ended.data["rows"]
    assert (ended.code, len(row["compiled"])) == ((Exit.OPEN, 4) if find_spec("triton") else (Exit.EVIDENCE_MISSING, 0))


def _receipt(outcome: Outcome, jit: JitCompiles, reason: str = "") -> Receipt:
    return Receipt(
        cell="s-h200-permute", stack="s", target="h200", probe="permute", outcome=outcome, reason=reason,
        requested="te", jit=jit, seconds={"total": 4.0},
    )  # fmt: skip


def test_the_last_line_of_a_task_is_read() -> None:
    kernel = {"library": "fa4", "kernel": "fwd", "shape": "", "seconds": 1.0, "looked_for": "", "cached": False}
    line = {"task": "t", "compiled": [kernel, kernel | {"cached": True}], "unwatched": {"te": "in memory"}}
    answer = read_answer(json.dumps(line | {"versions": {"torch": "2.13"}, "missing": "no GPU"}))
    assert ([one.kernel for one in answer.compiled], answer.hits) == (["fwd"], {"fa4": 1})
    assert (answer.unwatched, answer.missing, answer.versions) == (("te: in memory",), "no GPU", {"torch": "2.13"})
    with pytest.raises(ValueError, match="surprise"):
        read_answer(json.dumps(line | {"surprise": 1}))


def test_the_receipt_of_a_cell_is_read() -> None:
    listed = Told(library="triton", kernel="permute_kernel", shape="bf16 4096", seconds=1.0, when="after")
    jit = JitCompiles(after={"triton": 1}, compiled=(listed,), hits={"triton": 6}, unwatched={"te": "NVRTC in memory"})
    answer = read_receipt_answer(_receipt(Outcome.PASS, jit))
    (one,) = answer.compiled
    assert (one.library, one.kernel, one.shape) == ("triton", "permute_kernel", "bf16 4096")
    assert (answer.hits, answer.failure, answer.missing, answer.seconds) == ({"triton": 6}, "", "", 4.0)
    assert (answer.unwatched, answer.asked) == (("te: NVRTC in memory",), ("triton",))


@pytest.mark.parametrize(
    ("outcome", "good", "ran"),
    [
        (Outcome.EXPECTED_UNSUPPORTED, True, True), (Outcome.TIMEOUT, False, True), (Outcome.BLOCKED, True, False),
    ],
)  # fmt: skip
def test_only_a_good_cell_is_evidence(outcome: Outcome, good: bool, ran: bool) -> None:
    answer = read_receipt_answer(_receipt(outcome, JitCompiles(), "because"))
    assert (answer.failure == "", answer.missing == "") == (good, ran)


def test_side_by_side_and_those_that_train_alone() -> None:
    alone = PrewarmTask(
        id="smoke", library="inductor", code="smoke", targets=["h200"], gpu=True, settings={"cell": "x"}, seconds=99
    )
    begun, told = list[str](), list[str]()

    def run(task: PrewarmTask) -> Answer:
        begun.append(task.id)
        return Answer(seconds=float(task.seconds))

    answers = run_tasks([TASK, alone, LONGER], run, 1, Processes(), told.append)
    assert {task: answer.seconds for task, answer in answers.items()} == {TASK.id: 0.0, LONGER.id: 50.0, "smoke": 99.0}
    assert begun == [LONGER.id, TASK.id, "smoke"]
    assert len(told) == 3
