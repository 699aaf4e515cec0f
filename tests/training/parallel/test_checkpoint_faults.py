"""Checkpoints survive kill -9 and a full disk; another model's, or a damaged one, is refused."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed import checkpoint as dcp

from megacpp_validate.training.parallel import checkpoint
from megacpp_validate.training.parallel.checkpoint import CheckpointNotSaved, WrongCheckpoint
from tests.training.parallel.gloo_ranks import on_ranks
from tests.training.parallel.sharded_run import IDENTITY, Run, same

pytestmark = pytest.mark.thorough


def refusals(folder: str) -> dict[str, Any]:
    """What is said of checkpoints that are another model's, or damaged; and that nothing was loaded then."""
    run, said, root = Run(seed=1), {}, Path(folder)
    path = run.save(str(root / "fine"))
    fresh = Run(seed=99)
    before = fresh.whole()

    def ask(name: str, spoil: Any, identity: dict[str, Any] = IDENTITY) -> None:
        place = root / name
        if run.rank == 0:
            shutil.copytree(root / "fine", place)
            spoil(place / path.name)
        distributed.barrier()
        with pytest.raises(WrongCheckpoint) as caught:
            fresh.load(str(place), identity)
        assert same(before, fresh.whole())
        said[name] = str(caught.value)

    def files(place: Path) -> list[Path]:
        return sorted(place.glob("__*"))

    def flip(place: Path) -> None:
        whole = bytearray(files(place)[-1].read_bytes())
        whole[len(whole) // 2] ^= 1
        files(place)[-1].write_bytes(whole)

    ask("pattern", lambda place: None, {**IDENTITY, "pattern": "AM"})
    ask("truncated", lambda place: os.truncate(files(place)[0], 100))
    ask("flipped", flip)
    ask("missing", lambda place: files(place)[0].unlink())
    ask("metadata", lambda place: os.truncate(place / ".metadata", 10))
    ask("checksums", lambda place: os.truncate(place / "checksums.json", 40))
    ask("no checksums", lambda place: (place / "checksums.json").unlink())
    ask("other checksums", lambda place: (place / "checksums.json").write_text('{"a": 5}'))
    ask("latest is no text", lambda place: (place.parent / "latest").write_bytes(b"step-\xff\xfe"))
    ask("latest leads out", lambda place: (place.parent / "latest").write_text(f"../fine/{path.name}"))
    with no_reading():
        ask("unforeseen", lambda place: None)
    ask("none", lambda place: (place.parent / "latest").unlink())
    fresh.state["experts"], kept = fresh.state["experts"].float(), fresh.state["experts"]
    fresh.state["extra"] = torch.zeros(1)
    with pytest.raises(WrongCheckpoint) as caught:
        fresh.load(str(root / "fine"))
    said["tensors"] = str(caught.value)
    fresh.state["experts"] = kept
    del fresh.state["extra"]
    fresh.load(str(root / "fine"))
    said["loads"] = same(run.whole(), fresh.whole())
    return said


def test_what_is_no_checkpoint_of_this_model_is_refused(tmp_path: Path) -> None:
    first, second = on_ranks(2, refusals, str(tmp_path))
    assert first == second  # on every rank the same
    assert first.pop("loads")
    for name, words in {
        "pattern": "pattern is AE in the checkpoint and AM here",
        "truncated": "has 100 bytes of",
        "flipped": "has other bytes than were written",
        "missing": "cannot be read (No such file or directory)",
        "metadata": ".metadata has 10 bytes of",
        "checksums": "checksums.json cannot be read",
        "no checksums": "checksums.json cannot be read",
        "other checksums": "checksums.json cannot be read",
        "latest is no text": r"names no checkpoint of its folder: b'step-\xff\xfe'",
        "latest leads out": "names no checkpoint of its folder: b'../fine/step-",
        "unforeseen": "could not be read: rank 0: read: RuntimeError: nobody thought of it",
        "none": "there is no checkpoint in",
        "tensors": "tensor experts is float64[4, 6, 6] in the checkpoint and float32[4, 6, 6] here; tensor extra",
    }.items():
        assert words in first[name], first[name]
        assert "Next step" in first[name]
        assert "not saved" not in first[name]


@contextmanager
def no_reading() -> Iterator[None]:
    """What nobody foresaw happens while the first rank reads."""

    def fail(_: Path) -> None:
        raise RuntimeError("nobody thought of it")

    real, checkpoint._read_run = checkpoint._read_run, fail  # type: ignore[assignment]
    try:
        yield
    finally:
        checkpoint._read_run = real


@pytest.mark.parametrize("given", [b"", b" \n", b".", b"..", b"/tmp", b"a/b", b".writing-step-1", b"a\0b", b"a\nb"])
def test_what_latest_says_is_a_folder_beside_it(given: bytes, tmp_path: Path) -> None:
    latest = tmp_path / "latest"
    latest.write_bytes(b"step-00000003-0a1b2c3d\n")
    assert checkpoint.read_latest(tmp_path) == "step-00000003-0a1b2c3d"
    latest.write_bytes(given)
    with pytest.raises(WrongCheckpoint, match="Next step"):
        checkpoint.read_latest(tmp_path)


def killed_while_saving(folder: str, where: str) -> None:
    """Save once; train, and be killed in the second save."""
    run = Run(seed=1)
    run.save(folder)
    run.train(1)
    real = {"write": checkpoint.measure_file, "rename": Path.rename, "latest": checkpoint.write_whole}

    def die(*given: Any) -> Any:
        if where == "latest" and given[0].name != "latest":
            return real["latest"](*given)
        if where == "rename" and not given[0].is_dir():  # DCP renames a file of its own
            return real["rename"](*given)
        return os.kill(os.getpid(), signal.SIGKILL)

    if where == "write" and run.rank == 1:
        checkpoint.measure_file = die  # its files are written, and nobody knows
    elif where == "rename":
        Path.rename = die  # type: ignore[method-assign,assignment]
    elif where == "latest":
        checkpoint.write_whole = die
    run.save(folder)


def resumed_from(folders: list[str]) -> list[tuple[int, list[str]]]:
    """Of each folder the step of the latest checkpoint, which loads and is that of seed 1; saves clear the rest."""
    seen = []
    for folder in folders:
        run, wanted = Run(seed=99), Run(seed=1).whole()
        step = run.load(folder).step
        assert same(run.whole(), wanted)
        run.save(folder)
        run.save(folder)
        seen.append((step, sorted(path.name[:5] for path in Path(folder).iterdir())))
    return seen


def test_the_one_before_survives_kill_9(tmp_path: Path) -> None:
    folders = [tmp_path / where for where in ("write", "rename", "latest")]
    for folder in folders:
        with pytest.raises(AssertionError, match="no answer"):
            on_ranks(2, killed_while_saving, str(folder), folder.name)
        assert len(list(folder.glob("*step*"))) == 2  # the whole one, and what was left
    for seen in on_ranks(2, resumed_from, list(map(str, folders))):
        assert seen == [(0, ["lates", "step-", "step-"])] * 3


@contextmanager
def no_room_for_files(at_fault: int) -> Iterator[None]:
    """One rank cannot write files of more than 64 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if distributed.get_rank() == at_fault:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def no_room_for(name: str) -> Iterator[None]:
    """The disk is full when the first rank comes to one of the last files."""
    real = checkpoint.write_whole

    def write(path: Path, text: str) -> None:
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, text)

    checkpoint.write_whole = write
    try:
        yield
    finally:
        checkpoint.write_whole = real


def full_disk(folder: str) -> list[tuple[str, int, list[str]]]:
    """What is said of saves on a disk that is full at several points, and what is left."""
    run, seen = Run(seed=1), []
    run.save(folder)
    before = run.whole()
    run.train(1)
    for full in (no_room_for_files(0), no_room_for_files(1), no_room_for("checksums.json"), no_room_for("latest")):
        with full, pytest.raises(CheckpointNotSaved) as caught:
            run.save(folder)
        distributed.barrier()
        left = sorted(path.name[:5] for path in Path(folder).iterdir())
        fresh = Run(seed=99)
        step = fresh.load(folder).step
        assert same(before, fresh.whole())
        seen.append((str(caught.value), step, left))
    run.save(folder)  # there is room again
    return seen


def test_the_one_before_survives_a_full_disk(tmp_path: Path) -> None:
    for seen in on_ranks(2, full_disk, str(tmp_path)):
        for rank, (said, step, left) in zip((0, 1, 0, 0), seen, strict=True):
            assert step == 0
            assert left == ["lates", "step-"]
            assert f"not saved: rank {rank}: " in said
            assert "the disk is full" in said
            assert said.endswith("the one before is whole: resume from it.")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_is_one_of_dcp(tmp_path: Path) -> None:
    (name,) = on_ranks(1, saved_name, str(tmp_path))
    entry = {"run": "", "experts.exp_avg": torch.ones(4, 6, 6, dtype=torch.float64)}
    dcp.load(entry, storage_reader=dcp.FileSystemReader(tmp_path / name), no_dist=True)
    assert json.loads(entry["run"])["identity"] == {**IDENTITY, "betas": [0.9, 0.95]}
    assert not entry["experts.exp_avg"].any()
    assert set(json.loads((tmp_path / name / "checksums.json").read_text())) >= {".metadata"}
    assert (tmp_path / "latest").read_text() == name


def saved_name(folder: str) -> str:
    return Run(seed=1).save(folder, keep=1).name
