"""Checkpoints of a run on several ranks: complete or absent, and of this model or refused.

torch.distributed.checkpoint (DCP) stores each tensor once and distributes it anew among other ranks: a tensor that
ranks hold parts of is a DTensor; a plain tensor is the same on all ranks that have its name, and experts, which not all
have, are named by their number. The step and the identity of the model are an entry of the same checkpoint.

A checkpoint counts once the file `latest` names its folder, which is replaced in one step after everything is written:
a run that is killed or meets a full disk half way leaves the checkpoint before as the latest.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from torch import distributed

from ...evidence.receipt import write_whole
from .. import TrainingError

LATEST: Final = "latest"
_RUN: Final = "run"  # the entry beside tensors: step, world and identity as JSON


class WrongCheckpoint(TrainingError, ValueError):
    """A checkpoint that is absent, unreadable, or of another model."""


class CheckpointNotSaved(TrainingError, OSError):
    """A checkpoint that could not be written; the one before is still there."""


def save_checkpoint(
    folder: Path, state: Mapping[str, Any], *, step: int, identity: Mapping[str, Any], own: bytes = b""
) -> Path:
    """Write a checkpoint and make it the latest; a collective call, that raises on all ranks or on none.

    Args:
        folder: of all checkpoints of the run, on a file system that all ranks share.
        state: name -> tensor or DTensor; ranks may have other names; none is called "run".
        step: steps that are done.
        identity: of the model: name -> JSON value, such as the fields of its `Size`.
        own: state of this rank alone, of use in a world of the same size.

    Returns:
        Its folder.

    Raises:
        CheckpointNotSaved: with the fault of every rank.
    """
    from torch.distributed import checkpoint as dcp  # takes most of a second
    from torch.distributed.checkpoint.api import CheckpointException

    path = folder / f"step-{step:08d}-{_from_first(lambda: secrets.token_hex(4), CheckpointNotSaved)}"
    run = {"step": step, "world": distributed.get_world_size(), "identity": dict(identity), "own": bool(own)}
    try:
        _from_first(lambda: path.mkdir(parents=True), CheckpointNotSaved)
        dcp.save({**state, _RUN: json.dumps(run), **_own(own)}, storage_writer=dcp.FileSystemWriter(path))
        _from_first(lambda: _commit(folder, path), CheckpointNotSaved)
    except (CheckpointException, TrainingError) as fault:
        if distributed.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        raise CheckpointNotSaved(
            f"the checkpoint was not saved: {_short(fault)}. Likely cause: the disk is full, or the file system "
            "cannot be written. Next step: make room; resume from the one before, which is complete."
        ) from None
    return path


def load_checkpoint(folder: Path, state: Mapping[str, Any], *, identity: Mapping[str, Any]) -> tuple[int, bytes]:
    """Read the latest checkpoint into the tensors of `state`; a collective call, that raises on all ranks or on none.

    Args:
        folder: as it was saved into.
        state: name -> tensor or DTensor of the same names, whole shapes and dtypes; their distribution among ranks may
            differ.
        identity: of this model.

    Returns:
        Steps that the run had done; state of this rank alone, empty where there is none or where the world is another.

    Raises:
        WrongCheckpoint: there is none, DCP cannot read it, or it is of another model, with the differences; `state` is
            unchanged then.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    path = folder / _from_first(lambda: (folder / LATEST).read_text(encoding="utf-8").strip(), WrongCheckpoint)
    entry: dict[str, Any] = {_RUN: ""}
    try:
        dcp.load(entry, storage_reader=dcp.FileSystemReader(path))
        run = json.loads(entry[_RUN])
        _refuse_other(path, run["identity"], json.loads(json.dumps(dict(identity))))  # a tuple is a list in JSON
        same_world = run["own"] and run["world"] == distributed.get_world_size()
        wanted = {**state, **(_own(b"-") if same_world else {})}
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(path))
    except CheckpointException as fault:  # the same on every rank
        raise WrongCheckpoint(
            f"the checkpoint {path} cannot be read: {_short(fault)}. Likely cause: a copy that was cut short, or "
            f"tensors of another model. Next step: write the name of an older one into {folder / LATEST}."
        ) from None
    return run["step"], wanted[next(iter(_own(b"-")))] if same_world else b""


def _own(value: bytes) -> dict[str, bytes]:
    """The entry of this rank alone; none without a value."""
    return {f"rank/{distributed.get_rank()}of{distributed.get_world_size()}": value} if value else {}


def _commit(folder: Path, path: Path) -> None:
    """On the first rank, after all files are written; the checkpoint before is kept too."""
    write_whole(folder / LATEST, path.name)
    others = [old for old in sorted(folder.glob("step-*"), key=lambda old: old.stat().st_mtime_ns) if old != path]
    for old in others[:-1]:
        shutil.rmtree(old, ignore_errors=True)


def _refuse_other(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    other = sorted(name for name in saved.keys() | wanted.keys() if saved.get(name) != wanted.get(name))
    if other:
        raise WrongCheckpoint(
            f"the checkpoint {path} is of another model: {', '.join(other)} differ. Next step: resume with the size "
            "and pattern that it was saved with, or begin a new folder."
        )


def _from_first(action: Callable[[], Any], error: type[TrainingError]) -> Any:
    """The result of the first rank's action on all ranks, or its fault as an error."""
    said: list[Any] = [None, ""]
    if distributed.get_rank() == 0:
        try:
            said[0] = action()
        except Exception as fault:  # the others wait for it
            said[1] = f"{_short(fault)}. Next step: name the folder of the run, on a file system that all hosts share."
    distributed.broadcast_object_list(said, 0)
    if said[1]:
        raise error(said[1])
    return said[0]


def _short(fault: BaseException) -> str:
    failures = getattr(fault, "failures", {})  # of DCP, by rank
    shown = [f"rank {rank}: {type(one).__name__}: {one}" for rank, (one, _) in failures.items()]
    return "; ".join(shown)[:1000] or f"{type(fault).__name__}: {fault}"[:500]
