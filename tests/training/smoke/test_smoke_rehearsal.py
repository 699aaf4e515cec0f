"""A rehearsed run trains bit by bit as one that is not, and its account says where the time went."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp_validate.jit import compiles
from megacpp_validate.jit.compiles import saw
from megacpp_validate.training.smoke import trainer as trainer_module
from megacpp_validate.training.smoke.rank import make_receipt
from megacpp_validate.training.smoke.trainer import WARM
from tests.training.smoke.smoke_train import alone, new_trainer, order_of, same_weights, train


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    with alone():
        yield


def test_a_rehearsal_moves_nothing() -> None:
    given = {"precision": "fp32", "steps": 3, "audit": True, "plan": {"accumulate": 2}, "forms": {"recompute": True}}
    plain, rehearsed = train(given), train({**given, "rehearse": True})
    for name in ("losses", "others", "norms", "part_norms", "lacking", "dispatches"):
        assert plain[name] == rehearsed[name]
    assert same_weights(plain["weights"], rehearsed["weights"])


def test_a_rehearsal_moves_nothing_where_weights_are_rounded_copies_and_counts_no_step() -> None:
    given = {"precision": "bf16", "steps": 3}
    plain, rehearsed = train(given), train({**given, "rehearse": True})
    assert plain["losses"] == rehearsed["losses"]
    assert same_weights(plain["weights"], rehearsed["weights"])
    trainer = new_trainer(order_of(precision="bf16", rehearse=True))
    trainer.rehearse()
    states = trainer.optimizer.state_tensors().values()
    assert not any(state[part].any() for state in states for part in ("exp_avg", "exp_avg_sq"))
    assert {float(state["step"]) for state in trainer.optimizer._adam.state.values()} == {0.0}


@pytest.mark.usefixtures("te_double")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("precision", ["delayed", "current"])
def test_a_rehearsal_moves_no_scale_and_no_history_either(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In low precision it runs backward, too; a rehearsal that kept its maxima would be seen under delayed scaling."""
    given: dict[str, Any] = {"precision": precision, "target": "cpu", "features": {"preset": "production"}, "steps": 4}
    plain, rehearsed = train(given), train({**given, "rehearse": True})
    assert (plain["losses"], plain["norms"]) == (rehearsed["losses"], rehearsed["norms"])
    assert same_weights(plain["weights"], rehearsed["weights"])
    monkeypatch.setattr(trainer_module, "delayed_scaling_kept", lambda _: nullcontext())
    left = train({**given, "rehearse": True})
    assert (left["norms"] == plain["norms"]) == (precision == "current")


@pytest.mark.usefixtures("te_double")
@pytest.mark.filterwarnings("default")
def test_a_rehearsal_keeps_the_scales_and_histories_of_a_checkpoint(tmp_path: Path) -> None:
    given: dict[str, Any] = {"precision": "delayed", "target": "cpu", "features": {"preset": "production"}}
    train({**given, "steps": 3, "checkpoint_folder": str(tmp_path / "kept"), "checkpoint_every": 3})
    runs = []
    for rehearse in (False, True):
        folder = str(shutil.copytree(tmp_path / "kept", tmp_path / str(rehearse)))
        runs.append(train({**given, "steps": 6, "checkpoint_folder": folder, "resume": True, "rehearse": rehearse}))
    plain, rehearsed = runs
    assert (plain["losses"], plain["norms"]) == (rehearsed["losses"], rehearsed["norms"])
    assert same_weights(plain["weights"], rehearsed["weights"])
    assert plain["resumed"] == rehearsed["resumed"] == (3, 1)


def test_moments_of_a_run_that_has_done_steps_are_left_alone() -> None:
    trainer = new_trainer(order_of(precision="fp32", steps=2))
    trainer.run()
    before = {name: state["exp_avg"].clone() for name, state in trainer.optimizer.state_tensors().items()}
    trainer.rehearse()
    for name, state in trainer.optimizer.state_tensors().items():
        assert state["exp_avg"].equal(before[name])


def test_a_rehearsal_that_left_its_gradients_would_be_seen() -> None:
    plain, trainer = train({"precision": "fp32"}), new_trainer(order_of(precision="fp32", rehearse=True))
    trainer.optimizer.drop_gradients = lambda: None  # type: ignore[method-assign]
    trainer.run()
    assert [record.loss for record in trainer.records] != plain["losses"]


def test_a_rehearsal_is_in_the_account_of_compiling() -> None:
    trainer = new_trainer(order_of(precision="fp32", rehearse=True))
    trainer.rehearse()
    spent = trainer.ledger.close().phases_ns
    assert spent["compile"] > 0
    assert spent["step"] == 0
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_a_rank_says_what_it_compiled_and_when(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiles, "_seen", [])  # a rank tells of its whole process, and this one had other tests
    trainer = new_trainer(order_of(precision="fp32", steps=WARM + 1))

    def compile_in_each_step(_: object) -> None:
        saw("triton", f"kernel-{trainer.done}", "bf16[8]", 0.5, cached=False)

    trainer.run(compile_in_each_step)
    told = make_receipt(trainer, trainer.ledger, found=None, fault=None)["jit"]
    rows = [(one["kernel"], one["when"]) for one in told["compiled"] if one["kernel"].startswith("kernel-")]
    # What is compiled behind the last warm step belongs to the next, which should compile nothing.
    assert rows == [(f"kernel-{done}", "warm-up" if done < WARM else "after") for done in range(1, WARM + 2)]
    assert {"hits", "unwatched", "notes", "root", "arch", "mode"} < told.keys()
    assert torch.is_grad_enabled()
