"""Checkpoints are complete or absent: what dies half way, a full disk or another model leaves the one before."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from megacpp_validate.training.parallel import checkpoint
from megacpp_validate.training.parallel.checkpoint import (
    LATEST,
    CheckpointNotSaved,
    WrongCheckpoint,
    load_checkpoint,
    save_checkpoint,
)
from tests.training.parallel.gloo_ranks import on_ranks
from tests.training.smoke.smoke_train import alone

MODEL = {"size": "tiny", "seed": 0, "shape": (1, 2)}


def state(value: float) -> dict[str, Any]:
    return {"master/a": torch.full((4,), value), "exp_avg/a": torch.full((2, 2), 2 * value)}


def test_the_latest_is_loaded_and_older_ones_are_removed(tmp_path: Path) -> None:
    with alone():
        for step in (1, 2, 3):
            path = save_checkpoint(tmp_path, state(step), step=step, identity=MODEL, own=b"scales")
        assert (tmp_path / LATEST).read_text() == path.name
        assert [one.name[:13] for one in sorted(tmp_path.glob("step-*"))] == ["step-00000002", "step-00000003"]
        held = state(0.0)
        assert load_checkpoint(tmp_path, held, identity=MODEL) == (3, b"scales")
        assert all(torch.equal(held[name], one) for name, one in state(3.0).items())


@pytest.mark.parametrize(
    ("given", "identity", "words"),
    [
        (state(0.0), {**MODEL, "seed": 1, "more": 1}, "more, seed differ"),
        ({**state(0.0), "master/b": torch.zeros(1)}, MODEL, "master/b"),
        ({"master/a": torch.zeros(5)}, MODEL, "master/a|Size|size"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, given: dict[str, Any], identity: Any, words: str) -> None:
    with alone():
        save_checkpoint(tmp_path, state(1.0), step=1, identity=MODEL)
        with pytest.raises(WrongCheckpoint, match=words):
            load_checkpoint(tmp_path, given, identity=identity)
        assert not any(one.any() for one in given.values())


@pytest.mark.parametrize("stage", ["save", "commit"])
def test_a_save_that_dies_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    from torch.distributed import checkpoint as dcp

    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with alone():
        save_checkpoint(tmp_path, state(1.0), step=1, identity=MODEL)
        monkeypatch.setattr(*((dcp, "save", die) if stage == "save" else (checkpoint, "write_whole", die)))
        with pytest.raises((KeyboardInterrupt, CheckpointNotSaved)):
            save_checkpoint(tmp_path, state(2.0), step=2, identity=MODEL)
        monkeypatch.undo()
        assert load_checkpoint(tmp_path, held := state(0.0), identity=MODEL)[0] == 1
        assert torch.equal(held["master/a"], torch.ones(4))


def on_a_rank(folder: str) -> dict[str, str]:
    rank, seen = distributed.get_rank(), {}
    mine = {**state(1.0), f"master/expert.{rank}": torch.full((3,), float(rank))}
    save_checkpoint(Path(folder), mine, step=1, identity=MODEL, own=f"rank {rank}".encode())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    with pytest.raises(CheckpointNotSaved) as caught:
        save_checkpoint(Path(folder), mine, step=2, identity=MODEL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    seen["full"] = str(caught.value)
    held = {**state(0.0), f"master/expert.{rank}": torch.zeros(3)}
    step, own = load_checkpoint(Path(folder), held, identity=MODEL)
    assert held[f"master/expert.{rank}"].tolist() == [float(rank)] * 3
    seen["own"] = f"{step} {own.decode()}"
    return seen


@pytest.mark.thorough
def test_a_full_disk_of_one_rank_is_reported_by_all(tmp_path: Path) -> None:
    for rank, seen in enumerate(on_ranks(2, on_a_rank, str(tmp_path))):
        assert "rank 1: " in seen["full"]
        assert seen["own"] == f"1 rank {rank}"
    assert len(list(tmp_path.glob("step-*"))) == 1
