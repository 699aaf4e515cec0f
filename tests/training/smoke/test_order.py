"""Impossible orders are refused, with their reasons, before a process starts."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.bridge.errors import BridgeError
from megacpp_validate.training import TrainingError
from megacpp_validate.training.parallel.launch import RunEnd
from megacpp_validate.training.smoke import __main__ as process
from megacpp_validate.training.smoke import order as orders
from megacpp_validate.training.smoke.__main__ import main
from megacpp_validate.training.smoke.order import SAME_BITS, SmokeOrder, run_smoke

EXPERTS = {"data": 2, "expert_parallel": 2}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"changes": {"pattern": "AMXAR"}}, "pattern is 'AMXAR'"),
        ({"plan": {"data": 3}}, "batch 8 is not divisible by data"),
        ({"plan": {"accumulate": "2"}}, "accumulate is '2'"),
        ({"size": "huge"}, "unknown size 'huge'"),
        ({"steps": 0, "validate_every": -1}, "steps is 0, and is a whole number from 1 up; validate_every is -1"),
        ({"steps": "20", "plan": []}, "plan is []"),
        ({"audit": 1}, "audit is 1, and is a bool"),
        ({"steps": True}, "steps is True"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast'"),
        ({"precision": "fp16"}, "precision is 'fp16'"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"plan": {"tensor_parallel": 2}, "changes": {"num_gqa_groups": 2, "streams": 2}}, "streams are not split"),
        ({"resume": True}, "need a checkpoint_folder"),
        ({"checkpoint_every": 2}, "need a checkpoint_folder"),
        ({"features": {"preset": "fast"}}, "'fast'"),
        ({"forms": {"moe": "dense"}}, "moe is 'dense'"),
        ({"forms": {"recompute": "false"}}, "recompute is 'false', and is a bool"),
        ({"forms": {"moe": "padded"}, "plan": EXPERTS}, "no exchange with other ranks"),
        ({"precision": "deep_gemm", "plan": EXPERTS}, "no exchange with other ranks"),
    ],
)
def test_impossible_orders_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(orders, "launch", None)  # which a process would need
    with pytest.raises((TrainingError, BridgeError), match="Next step") as caught:
        run_smoke(SmokeOrder(**given), tmp_path / "run")
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_an_order_is_read_as_it_was_written(tmp_path: Path) -> None:
    order = SmokeOrder(forms={"expert_backends": ["native"]}, learning_rate=1, warm_up=3, deterministic=True)
    again = SmokeOrder(**json.loads(Path(order.write(tmp_path)).read_text()))
    assert again == order
    assert again.read_forms().expert_backends == ("native",)
    assert (again.read_schedule().steps, again.read_schedule().warm_up) == (20, 3)
    assert SmokeOrder(steps=5, schedule_steps=9).read_schedule().steps == 9
    assert (again.environment, SmokeOrder().environment) == (SAME_BITS, {})
    assert (again.recipe, SmokeOrder(precision="block").recipe) == (None, "block")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ('{"steps": 3}', "folder"),
        ('{"folder": "run", "colour": "red"}', "'colour'"),
        ('{"folder": "run", "size": "huge"}', "unknown size"),
        (
            '{"folder": "run", "features": {"preset": "routers"}}',
            "'routers' was rolled back: 8.8% of the tokens go to other experts",
        ),
        ('{"limit_s": "long"}', "float"),
    ],
)
def test_the_process_reports_in_its_last_line_why_nothing_was_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main() == 2
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (answer["ending"], answer["ranks"], answer["culprits"], answer["seconds"]) == ("refused", [], [], 0.0)
    assert said in answer["words"]


@pytest.mark.parametrize(("ending", "code"), [("done", 0), ("died", 1)])
def test_the_process_reports_the_end_of_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ending: str, code: int
) -> None:
    rows = tuple(
        {"rank": rank, "receipt": receipt} for rank, receipt in ((1, {"rank": 1}), (0, {"rank": 0}), (2, None))
    )

    def run(order: SmokeOrder, folder: Path, **limits: float) -> RunEnd:
        assert (order.steps, folder, limits) == (3, Path("run"), {"limit_s": 9.0})
        return RunEnd(ending, (1,), "words", rows, 2.5)

    monkeypatch.setattr(process, "run_smoke", run)
    monkeypatch.setattr("sys.stdin", io.StringIO('{"steps": 3, "limit_s": 9, "folder": "run"}'))
    assert main() == code
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (answer["ending"], answer["culprits"], answer["ranks"]) == (ending, [1], [{"rank": 0}, {"rank": 1}])
