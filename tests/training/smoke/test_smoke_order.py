"""What a run is asked: what cannot be is refused before a process starts, with its reason."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.bridge.errors import BridgeError
from megacpp_validate.training.errors import TrainingError
from megacpp_validate.training.smoke import run as smoke_run
from megacpp_validate.training.smoke.__main__ import main
from megacpp_validate.training.smoke.order import SmokeOrder, read_order, write_order
from megacpp_validate.training.smoke.run import run_smoke

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"changes": {"pattern": "AMXAR"}}, "has 'X' at place 3 of 5"),
    ({"changes": {"pattern": 7}}, "the pattern is 7"),
    ({"changes": {"num_experts": 3}, "plan": {"world": 2, "data": 2, "expert_parallel": 2}}, "num_experts 3 is not"),
    ({"plan": {"world": 4, "data": 2}}, "makes 2 rank(s), and the world has 4: ranks would be idle"),
    ({"plan": {"data": 2}}, "ranks are missing"),
    ({"changes": {"batch": 2}, "plan": {"world": 4, "data": 4}}, "leaves a rank 0 tokens"),
    ({"changes": {"batch": 6}, "plan": {"world": 4, "data": 4}}, "batch 6 is not divisible by data 4"),
    ({"plan": {"world": 2, "tensor_parallel": 2}}, "num_gqa_groups 1 is not divisible by tensor_parallel 2"),
    ({"plan": {"accumulate": "2"}}, "accumulate is '2'"),
    ({"plan": {"pipeline": 2}}, "a plan has no pipeline"),
    ({"changes": {"depth": 3}}, "a size has no 'depth'"),
    ({"size": "huge"}, "there is no size 'huge'"),
    ({"colour": "red"}, "unknown keys: colour"),
    ({"steps": 0, "validate_every": -1}, "steps is 0, and is 1 at the least; validate_every is -1"),
    ({"steps": "20", "audit": 1, "plan": []}, "is of dict[str, Any]; steps is '20', and is of int; audit"),
    ({"steps": True}, "steps is True"),
    ({"learning_rate": "fast"}, "learning_rate is 'fast'"),
    ({"learning_rate": -1}, "learning_rate is -1, and is above 0"),
    ({"warm_up": 20}, "warm_up is 20, and lies from 0 to below steps (20)"),
    ({"precision": "fp16"}, "precision is 'fp16'"),
    ({"device": "tpu"}, "device is 'tpu'"),
    ({"precision": "delayed"}, "the target cpu has no recipe delayed"),
    ({"precision": "mxfp8", "target": "h200"}, "the target h200 has no recipe mxfp8"),
    ({"target": "h300"}, "there is no target 'h300'"),
    ({"resume": True}, "no checkpoint_folder for them"),
    ({"checkpoint_every": 2}, "no checkpoint_folder for them"),
    ({"features": {"preset": "fast"}}, "there is no preset 'fast'"),
    ({"features": {"norm": "no"}}, "features norm are neither true nor false"),
    ({"forms": {"moe": "dense"}}, "there is no way 'dense' to the experts"),
    ({"forms": {"recompute": "false"}}, "forms recompute are neither true nor false"),
    ({"forms": {"speed": True}}, "there is no form of speed"),
    ({"forms": {"graphs": True}, "plan": {"world": 2, "data": 2}}, "capture on one rank"),
    (
        {
            "forms": {"moe": "jagged"},
            "changes": {"capacity_factor": 1.5},
            "plan": {"world": 2, "data": 2, "expert_parallel": 2},
        },
        "over an expert's capacity",
    ),
    ({"forms": {"moe": "padded"}, "plan": {"world": 2, "data": 2, "expert_parallel": 2}}, "knows no other ranks"),
    ({"fault": "gremlin"}, "there is no fault 'gremlin'"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=lambda value: None if isinstance(value, str) else str(value))
def test_what_cannot_be_is_refused_before_a_process_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(smoke_run, "launch", started)
    with pytest.raises((TrainingError, BridgeError)) as caught:
        run_smoke(read_order(json.dumps(given)), tmp_path / "run")
    assert said in str(caught.value)
    assert "Next step" in str(caught.value)
    assert not (tmp_path / "run").exists()


def started(*given: Any, **named: Any) -> Any:
    raise AssertionError("processes were started")


@pytest.mark.parametrize("text", ["", "[]", "null", "{"])
def test_what_is_no_order_is_refused(text: str) -> None:
    with pytest.raises(TrainingError, match="cannot be read"):
        read_order(text)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smoke_run, "launch", started)
    with pytest.raises(TrainingError, match="each with a GPU of its own, and"):
        run_smoke(SmokeOrder(device="cuda", changes={"batch": 1024}, plan={"world": 512, "data": 512}), tmp_path)


def test_an_order_is_read_as_it_was_written(tmp_path: Path) -> None:
    order = SmokeOrder(
        plan={"accumulate": 2}, forms={"expert_backends": ["native"], "recompute": True}, learning_rate=1, warm_up=3
    )
    write_order(order, tmp_path / "order.json")
    again = read_order((tmp_path / "order.json").read_text())
    assert asdict(again) == asdict(order)
    assert again.read_plan().accumulate == 2
    assert again.read_forms().expert_backends == ("native",)
    assert (again.read_schedule().steps, again.read_schedule().warm_up) == (20, 3)
    assert read_order('{"steps": 5, "schedule_steps": 9}').read_schedule().steps == 9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no JSON came in"),
        ("[]", "is no JSON object"),
        ('{"limit_s": "long"}', "limit_s is 'long'"),
        ('{"silent_s": 0}', "silent_s is 0"),
        ('{"changes": {"pattern": "B"}}', "has 'B' at place 1"),
        ('{"precision": "delayed"}', "has no recipe delayed"),
        ('{"folder": "/dev/null/run", "steps": 1}', "Not a directory"),
    ],
)
def test_the_process_says_in_its_last_line_why_nothing_was_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main() == 2
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer.keys() == {"ending", "culprits", "words", "seconds", "ranks"}
    assert (answer["ending"], answer["ranks"]) == ("refused", [])
    assert said in answer["words"]
