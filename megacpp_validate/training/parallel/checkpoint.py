"""Checkpoints of a run on several ranks: whole or not there, and of this model or refused.

Tensors go through torch.distributed.checkpoint, which stores each once and shares it out anew among other ranks: a
tensor that ranks hold parts of is a DTensor; a plain tensor is the same on all ranks that have its name, and experts,
which not all have, are named by their number.

A checkpoint is written aside, its folder renamed, and then named by the file `latest`, which is replaced at once. So
whatever dies half way, kill -9 or a full disk, the one before is still the latest. A manifest says of which model it
is, and the size and CRC-32 of every file (which finds damage, not forgery: load what you wrote).
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import distributed

from ...evidence.whole_file import write_whole
from ..errors import TrainingError
from .checkpoint_manifest import (
    Manifest,
    WrongCheckpoint,
    describe_tensors,
    find_damage,
    find_differences,
    measure_file,
    read_manifest,
)

LATEST: Final = "latest"
MANIFEST: Final = "manifest.json"
ASIDE: Final = ".writing-"
_NAME: Final = re.compile(r"[\w-][\w.-]*", re.ASCII)  # of one folder: no way out, and nothing that is written aside


class CheckpointNotSaved(TrainingError, OSError):
    """A checkpoint that could not be written; the one before is still there."""


@dataclass(frozen=True)
class Resumed:
    """What was loaded beside tensors.

    Attributes:
        step: that the run had done.
        plain: as it was saved.
        world: ranks that it was saved by.
        path: of the checkpoint.
    """

    step: int
    plain: Mapping[str, Any]
    world: int
    path: Path


def save_checkpoint(
    folder: Path,
    state: Mapping[str, Any],
    *,
    step: int,
    identity: Mapping[str, Any],
    plain: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Write a checkpoint and make it the latest; a collective call, that raises on all ranks or on none.

    Args:
        folder: of all checkpoints of the run, on a file system that all ranks share.
        state: name -> tensor or DTensor; ranks may have other names.
        step: steps that are done.
        identity: what tells this model from another: name -> JSON value, such as the fields of its `Size`.
        plain: name -> JSON value, the same on all ranks.
        keep: how many are kept, the new one among them.

    Returns:
        Where it lies.

    Raises:
        CheckpointNotSaved: with what every rank saw.
    """
    name: str = _from_first(lambda: _begin(folder, step), "begin")
    aside = folder / f"{ASIDE}{name}"
    told = _from_all(_write_parts(aside, state))
    if found := sorted({fault for some, _ in told for fault in some}):
        _from_first(lambda: _remove(aside), "remove")
        raise _not_saved("; ".join(found))
    manifest = Manifest(
        step=step,
        world=distributed.get_world_size(),
        identity=dict(identity),
        tensors=_describe_all(state),
        plain=dict(plain or {}),
        files={file: measured for _, some in told for file, measured in some.items()},
    )
    _from_first(lambda: _commit(folder, name, manifest, keep), "commit")
    return folder / name


def load_checkpoint(folder: Path, state: Mapping[str, Any], *, identity: Mapping[str, Any]) -> Resumed:
    """Read the latest checkpoint into the tensors of `state`; a collective call, that raises on all ranks or on none.

    Args:
        folder: as it was saved into.
        state: name -> tensor or DTensor of the same names, whole shapes and dtypes; how they are shared out among ranks
            may be another.
        identity: of this model.

    Raises:
        WrongCheckpoint: there is none, it is damaged, or it is of another model; every difference is named. Nothing of
            `state` was changed then.
    """
    name, manifest = _from_first(lambda: _read_latest(folder), "read", _not_read)
    path = folder / name
    if faults := find_differences(manifest, identity, _describe_all(state)):
        raise WrongCheckpoint(
            f"the checkpoint {path} is of another model: {'; '.join(faults)}. Next step: resume with the size and "
            "pattern that it was saved with, or begin a new folder.",
            tuple(faults),
        )
    world, rank = distributed.get_world_size(), distributed.get_rank()
    mine = sorted(manifest.files.items())[rank::world]
    damage = [
        fault for some in _from_all([find_damage(path / file, wanted) for file, wanted in mine]) for fault in some
    ]
    if found := sorted(filter(None, damage)):
        raise WrongCheckpoint(
            f"the checkpoint {path} is damaged: {'; '.join(found)}. Likely cause: a copy that was cut short, a disk "
            "that was full, or a folder that not all hosts share. Next step: copy it again, or write the name of an "
            f"older one into {folder / LATEST}.",
            tuple(found),
        )
    from torch.distributed import checkpoint as dcp  # takes most of a second

    dcp.load(dict(state), storage_reader=dcp.FileSystemReader(path))
    return Resumed(manifest.step, manifest.plain, manifest.world, path)


def _describe_all(state: Mapping[str, Any]) -> dict[str, str]:
    """Of the tensors of all ranks."""
    return {name: said for some in _from_all(describe_tensors(state)) for name, said in sorted(some.items())}


def _write_parts(aside: Path, state: Mapping[str, Any]) -> tuple[list[str], dict[str, list[int]]]:
    """What went wrong on any rank, and the files of this one."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(aside))
        return [], {path.name: measure_file(path) for path in sorted(aside.glob(f"__{distributed.get_rank()}_*"))}
    except CheckpointException as caught:  # on every rank alike; no Exception of Python's
        return [f"rank {rank}: {_short(fault)}" for rank, (fault, _) in caught.failures.items()], {}
    except Exception as caught:  # the others wait for it
        return [f"rank {distributed.get_rank()}: {_short(caught)}"], {}


def _begin(folder: Path, step: int) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f"{ASIDE}*"):  # of a run that was killed while it wrote
        shutil.rmtree(stale, ignore_errors=True)
    name = f"step-{step:08d}-{secrets.token_hex(4)}"
    (folder / f"{ASIDE}{name}").mkdir()
    return name


def _commit(folder: Path, name: str, manifest: Manifest, keep: int) -> None:
    """On the first rank, after all files are written."""
    aside, path = folder / f"{ASIDE}{name}", folder / name
    try:
        _refuse_other_disks(aside, manifest)
        metadata = aside / ".metadata"
        whole = Manifest(**{**vars(manifest), "files": {**manifest.files, metadata.name: measure_file(metadata)}})
        write_whole(aside / MANIFEST, json.dumps(vars(whole), allow_nan=False))
        _sync(aside)
        aside.rename(path)
        write_whole(folder / LATEST, name)
        _sync(folder)
    except BaseException:
        _remove(aside)
        _remove(path)
        raise
    named = [old for old in sorted(folder.glob("step-*"), key=lambda old: old.stat().st_mtime_ns) if old != path]
    for old in named[: max(0, len(named) + 1 - max(1, keep))]:
        _remove(old)


def _refuse_other_disks(aside: Path, manifest: Manifest) -> None:
    """What other ranks wrote is seen from here."""
    if lacking := sorted(file for file in manifest.files if not (aside / file).exists()):
        raise CheckpointNotSaved(
            f"the checkpoint was not saved: of {len(manifest.files)} files that ranks wrote, the first rank does not "
            f"see {', '.join(lacking[:3])}. Likely cause: {aside.parent} is no folder that all hosts share. Next step: "
            "name one that is; the one before is whole: resume from it."
        )


def read_latest(folder: Path) -> str:
    """The name of the latest checkpoint, which lies in the folder itself.

    Raises:
        WrongCheckpoint: there is none, or what stands there is no such name.
    """
    try:
        given = (folder / LATEST).read_bytes()
    except OSError as fault:
        raise WrongCheckpoint(
            f"there is no checkpoint in {folder}: {fault}. Likely cause: another folder, or a run that was killed "
            "before its first save. Next step: begin anew, or name the folder of the run.",
            (),
        ) from fault
    name = given.decode("utf-8", errors="replace").strip()
    if not _NAME.fullmatch(name):
        raise WrongCheckpoint(
            f"{folder / LATEST} names no checkpoint of its folder: {given[:80]!r}. Likely cause: a copy that was cut "
            f"short, or a file of something else. Next step: write the name of a checkpoint of {folder} into it.",
            (f"{LATEST} is {given[:80]!r}",),
        )
    return name


def _read_latest(folder: Path) -> tuple[str, Manifest]:
    name = read_latest(folder)
    return name, read_manifest(folder / name / MANIFEST)


def _from_all(value: Any) -> list[Any]:
    """A value of every rank."""
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def _from_first(action: Callable[[], Any], stage: str, word: Callable[[str], TrainingError] | None = None) -> Any:
    """What the first rank's action gave, or its fault, on all ranks; `word` makes an error of what nobody foresaw."""
    word = word or _not_saved
    said: list[Any] = [None, None]
    if distributed.get_rank() == 0:
        try:
            said[0] = action()
        except TrainingError as fault:
            said[1] = fault
        except Exception as fault:  # the others wait for it
            said[1] = word(f"rank 0: {stage}: {_short(fault)}")
    distributed.broadcast_object_list(said, 0)
    if said[1] is not None:
        raise said[1]
    return said[0]


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Names are safe once their folder is written."""
    descriptor = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # a file system that cannot
        os.fsync(descriptor)
    os.close(descriptor)


def _not_saved(what: str) -> CheckpointNotSaved:
    full = any(os.strerror(number) in what for number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT))
    cause = "the disk is full, or a limit on it was reached" if full else "a file system that cannot be written"
    return CheckpointNotSaved(
        f"the checkpoint was not saved: {what}. Likely cause: {cause}. Next step: make room, or keep fewer "
        "checkpoints; the one before is whole: resume from it."
    )


def _not_read(what: str) -> WrongCheckpoint:
    return WrongCheckpoint(
        f"the checkpoint could not be read: {what}. Likely cause: a file of it is not what was written. Next step: "
        "copy it again, or take an older checkpoint.",
        (what,),
    )


def _short(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {fault}"[:500]
