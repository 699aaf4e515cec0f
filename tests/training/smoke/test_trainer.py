"""A trainer of one rank, in this process: evaluation changes nothing, checkpoints hold, receipts are JSON."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp_validate.jit import monitor
from megacpp_validate.jit.monitor import saw
from megacpp_validate.training.parallel.ranks import Rank
from megacpp_validate.training.smoke import rank
from megacpp_validate.training.smoke.rank import compare_arms, make_receipt
from megacpp_validate.training.smoke.trainer import WARM, NotFinite, SmokeTrainer, exposed_seconds
from tests.training.smoke.smoke_train import alone, new_trainer, order_of, same_weights, train


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    with alone():  # for checkpoints
        yield


def test_evaluation_leaves_training_bitwise_as_it_is_without() -> None:
    given = {"precision": "fp32", "steps": 4, "plan": {"accumulate": 2}, "forms": {"recompute": True}}
    plain, validated = train(given), train({**given, "validate_every": 2})
    assert plain["losses"] == validated["losses"]
    assert plain["norms"] == validated["norms"]
    assert same_weights(plain["weights"], validated["weights"])
    assert plain["validation"] == {}
    assert list(validated["validation"]) == [0, 2, 4]
    assert validated["validation"][4] < validated["validation"][0]


def test_a_run_resumes_bit_by_bit(tmp_path: Path) -> None:
    saving = {"precision": "fp32", "checkpoint_folder": str(tmp_path), "schedule_steps": 5}
    whole = train({**saving, "steps": 5, "checkpoint_folder": str(tmp_path / "whole"), "checkpoint_every": 2})
    train({**saving, "steps": 3})
    rest = train({**saving, "steps": 5, "resume": True, "validate_every": 2})
    assert rest["resumed"] == 3
    assert rest["losses"] == whole["losses"][3:]
    assert rest["norms"] == whole["norms"][3:]
    assert list(rest["validation"]) == [4, 5]
    assert same_weights(rest["weights"], whole["weights"])
    saved = sorted(path.name for path in (tmp_path / "whole").glob("step-*"))
    assert [name[:13] for name in saved] == ["step-00000004", "step-00000005"]
    # At the end already: nothing is trained, and the checkpoint stays the same.
    latest = (tmp_path / "latest").read_text()
    again = train({**saving, "steps": 5, "resume": True})
    assert (again["losses"], again["resumed"]) == ([], 5)
    assert same_weights(again["weights"], whole["weights"])
    assert (tmp_path / "latest").read_text() == latest


@pytest.mark.parametrize("part", ["master", "parameter"])
def test_an_expert_that_stays_while_others_move_is_named(part: str) -> None:
    trainer = new_trainer(order_of(audit=True, precision="bf16", steps=2))
    audit = trainer.audit
    assert audit is not None
    assert audit.unmoved() is None  # before the first step
    (name,) = (name for name in trainer.optimizer.parameters() if name.startswith("layers.2.up."))
    held = trainer.optimizer.parameters()[name] if part == "parameter" else trainer.optimizer.master(name)
    first = held.detach()[3].clone()

    for _ in range(2):
        trainer.step()
        with torch.no_grad():
            held.detach()[3].copy_(first)
    assert audit.unmoved() == ["layers.2.up expert 3"]
    assert make_receipt(trainer, trainer.ledger)["unmoved"] == ["layers.2.up expert 3"]
    trainer.order = replace(trainer.order, steps=3)
    trainer.run()
    assert audit.unmoved() == []


def test_a_receipt_is_json_whatever_the_run_came_to() -> None:
    keys = None
    for given in ({"audit": True}, {"watch": True}, {"profile": True, "steps": 7, "checkpoint_every": 0}):
        trainer = new_trainer(order_of(**given))
        for _ in range(2):  # before the first step, and after the last
            receipt = make_receipt(trainer, trainer.ledger)
            again = json.loads(json.dumps(receipt, allow_nan=False))
            assert keys is None or keys == again.keys()
            keys = again.keys()
            if not trainer.records:
                trainer.run()
        assert len(again["steps"]) == trainer.order.steps
        assert sum(again["goodput"]["phases_ns"].values()) == round(again["goodput"]["whole_s"] * 1e9)
        assert again["goodput"]["tokens"] == trainer.order.steps * trainer.tokens


@pytest.mark.parametrize("step", [1, 2])
def test_a_value_that_is_no_number_is_named_and_told(step: int) -> None:
    trainer = new_trainer(order_of(watch=True))

    def spoil(module: Any, given: Any, out: Any) -> None:
        if trainer.done == step:
            out.rows.data[0, 0, 0] = float("nan")

    trainer.model.layers[1].register_forward_hook(spoil, prepend=True)
    with pytest.raises(NotFinite) as caught:
        trainer.run()
    assert (caught.value.where["step"], caught.value.where["module"]) == (step, "layers.1")
    receipt = make_receipt(trainer, trainer.ledger, caught.value)
    assert receipt["culprits"] == [0]
    assert receipt["steps"][-1]["loss"] == "nan"
    assert receipt["fault"].startswith("NotFinite: ")
    json.dumps(receipt, allow_nan=False)


def test_a_rehearsal_moves_nothing_and_is_in_the_account_of_compiling() -> None:
    for precision in ("fp32", "bf16"):
        given = {"precision": precision, "audit": True, "plan": {"accumulate": 2}, "forms": {"recompute": True}}
        plain, rehearsed = train(given), train({**given, "rehearse": True})
        for name in ("losses", "others", "norms", "part_norms", "lacking"):
            assert plain[name] == rehearsed[name]
        assert same_weights(plain["weights"], rehearsed["weights"])
    trainer = new_trainer(order_of(precision="fp32", steps=2))
    trainer.rehearse()
    phases = trainer.ledger.close()["phases_ns"]
    assert (phases["compile"] > 0, phases["step"]) == (True, 0)


@pytest.mark.usefixtures("te_double")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("precision", ["delayed", "current"])
def test_scales_and_histories_survive_rehearsals_and_checkpoints(precision: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"precision": precision, "target": "cpu", "features": {"preset": "production"}}
    whole = train({**given, "steps": 5})
    saving = {**given, "checkpoint_folder": str(tmp_path), "schedule_steps": 5}
    train({**saving, "steps": 3, "rehearse": True})
    rest = train({**saving, "steps": 5, "resume": True, "rehearse": True})
    assert (rest["losses"], rest["norms"]) == (whole["losses"][3:], whole["norms"][3:])
    assert same_weights(rest["weights"], whole["weights"])


def test_exposed_time_is_that_of_collectives_alone() -> None:
    assert exposed_seconds([(0, 10e6), (5e6, 20e6)], [(8e6, 12e6), (15e6, 30e6)]) == 11.0
    assert exposed_seconds([], [(0, 1e6)]) == 0.0
    assert exposed_seconds([(0, 2e6)], []) == 2.0


def test_a_receipt_has_compiles_by_the_step_that_they_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "_seen", [])  # a rank reports its whole process, and this one had other tests
    trainer = new_trainer(order_of(precision="fp32", steps=WARM + 1))
    for _ in range(WARM + 1):
        trainer.step()
        saw("triton", f"kernel-{trainer.done}", "bf16[8]", 0.5, cached=False)
    rows = make_receipt(trainer, trainer.ledger)["jit"]["compiled"]
    seen = [(one["kernel"], one["when"]) for one in rows if one["kernel"].startswith("kernel-")]
    # What is compiled behind the last warm step belongs to the next, which should compile nothing.
    assert seen == [(f"kernel-{done}", "warm-up" if done < WARM else "after") for done in range(1, WARM + 2)]


def test_an_evaluation_that_is_no_number_ends_the_run() -> None:
    trainer = new_trainer(replace(order_of(), validate_every=1))
    with torch.no_grad():
        trainer.model.norm.weight.mul_(float("nan"))
    with pytest.raises(NotFinite, match="the loss of an evaluation is nan"):
        trainer.run()


TURNS = asdict(order_of(steps=200))


def test_two_arms_take_turns_until_the_interval_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Student's t of 0 decides at the first look that has it."""
    take, turns = rank._take_block, list[bool]()

    def see(trainer: SmokeTrainer, steps: int) -> float:
        turns.append("trajectory_coefficient" in trainer.order.changes)
        return take(trainer, steps)

    monkeypatch.setattr(rank, "_take_block", see)
    taxed = {**TURNS, "changes": {**TURNS["changes"], "trajectory_coefficient": 0.02}}
    looks = {"4": 1e9, "6": 0.0, "8": 0.0}
    left = compare_arms({"off": TURNS, "on": taxed}, Rank(0), looks, 0.05, math.inf)
    off, on = left["arms"]["off"], left["arms"]["on"]
    assert (len(left["pairs"]), 2 <= left["steps"] <= 8, turns) == (6, True, [False, True, True, False] * 3)
    assert len(off["steps"]) == len(on["steps"]) == 8 + 6 * left["steps"]
    assert [step["perfect"] for step in off["steps"]] == [step["perfect"] for step in on["steps"]]  # the same batches
    assert off["peak_bytes"] > 0


def test_features_in_one_process_end_with_the_budget_and_a_fault_stays_its_own(tmp_path: Path) -> None:
    arms = {"broken": {"off": {**TURNS, "size": "huge"}, "on": TURNS}, "late": {"off": TURNS, "on": TURNS}}
    given = {"arms": arms, "folder": str(tmp_path), "device": "cpu", "looks": {"4": 1e9, "6": 1e9}, "least": 0.05}
    for seconds, left in ((0.0, set()), (30.0, {"broken", "late"})):
        words = json.dumps({**given, "seconds": seconds})
        command = [sys.executable, "-m", "megacpp_validate.training.smoke"]
        subprocess.run(command, input=words, text=True, capture_output=True, check=True)
        answers = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
        assert answers.keys() == left
    assert answers["broken"]["fault"].startswith("WrongSize: unknown size 'huge'")
    assert len(answers["late"]["pairs"]) == 6
