"""Checkpoints of a run on several ranks: whole or not there, and of this model or refused.

torch.distributed.checkpoint (DCP) stores each tensor once and shares it out anew among other ranks: a tensor that ranks
hold parts of is a DTensor; a plain tensor is the same on all ranks that have its name, and experts, which not all have,
are named by their number. The step and the identity of the model are an entry of the same checkpoint.

A checkpoint is written aside, its folder renamed, and then named by the file `latest`, which is replaced at once. So
whatever dies half way, kill -9 or a full disk, the one before is still the latest. DCP does not notice changed bytes:
`checksums.json` has the size and CRC-32 of every file (which finds damage, not forgery: load what you wrote).
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import warnings
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import distributed

from ...evidence.whole_file import write_whole
from ..errors import TrainingError

LATEST: Final = "latest"
OF_RANK: Final = "rank/"  # tensors of one rank and its build, which another world has no use for
_CHECKSUMS: Final = "checksums.json"
_ASIDE: Final = ".writing-"
_RUN: Final = "run"  # the entry beside tensors: step, world, identity and plain values as JSON
_NAME: Final = re.compile(r"[\w-][\w.-]*", re.ASCII)  # of one folder: no way out, and nothing that is written aside
_SHOWN: Final = 6  # differences
_CHUNK: Final = 1 << 22  # bytes


class WrongCheckpoint(TrainingError, ValueError):
    """A checkpoint that is not there, damaged, or of another model.

    Attributes:
        faults: all of them.
    """

    def __init__(self, text: str, faults: tuple[str, ...]) -> None:
        super().__init__(text)
        self.faults = faults

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.faults)  # it goes from rank to rank


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
        state: name -> tensor or DTensor; ranks may have other names; none is called "run".
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
    aside = folder / f"{_ASIDE}{name}"
    world = distributed.get_world_size()
    run = {"step": step, "world": world, "identity": dict(identity), "plain": dict(plain or {})}
    written = _from_all(_write_parts(aside, {**state, _RUN: json.dumps(run, allow_nan=False)}))
    if found := sorted({fault for some, _ in written for fault in some}):
        _from_first(lambda: _remove(aside), "remove")
        raise _not_saved("; ".join(found))
    files = {file: measured for _, some in written for file, measured in some.items()}
    _from_first(lambda: _commit(folder, name, files, keep), "commit")
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
    path, files = _from_first(lambda: _find_latest(folder), "read", _not_read)
    mine = sorted(files.items())[distributed.get_rank() :: distributed.get_world_size()]
    damage = [
        fault for some in _from_all([_find_damage(path / file, wanted) for file, wanted in mine]) for fault in some
    ]
    if found := sorted(filter(None, damage)):
        raise WrongCheckpoint(
            f"the checkpoint {path} is damaged: {'; '.join(found)}. Likely cause: a copy that was cut short, a disk "
            "that was full, or a folder that not all hosts share. Next step: copy it again, or write the name of an "
            f"older one into {folder / LATEST}.",
            tuple(found),
        )
    run, stored = _from_first(lambda: _read_run(path), "read", _not_read)
    here = {name: kind for some in _from_all(_describe(state)) for name, kind in some.items()}
    given = json.loads(json.dumps(dict(identity)))  # a tuple is a list in JSON
    if faults := _find_differences("", run["identity"], given) + _find_differences("tensor ", stored, here):
        raise WrongCheckpoint(
            f"the checkpoint {path} is of another model: {'; '.join(faults)}. Next step: resume with the size and "
            "pattern that it was saved with, or begin a new folder.",
            tuple(faults),
        )
    from torch.distributed import checkpoint as dcp  # takes most of a second

    dcp.load(dict(state), storage_reader=dcp.FileSystemReader(path))
    return Resumed(run["step"], run["plain"], run["world"], path)


def stored_tensors(folder: Path) -> dict[str, str]:
    """Name -> dtype and whole shape, as in "float32[4, 8]", of the latest checkpoint; none where it cannot be read."""
    from torch.distributed import checkpoint as dcp

    try:
        metadata = dcp.FileSystemReader(folder / read_latest(folder)).read_metadata().state_dict_metadata
    except Exception:  # `load_checkpoint` says on all ranks why
        return {}
    return _describe_stored(metadata)


def _describe_stored(metadata: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: f"{str(one.properties.dtype).removeprefix('torch.')}{list(one.size)}"
        for name, one in metadata.items()
        if hasattr(one, "properties")
    }


def _describe(state: Mapping[str, Any]) -> dict[str, str]:
    """As `stored_tensors`, of tensors; of a DTensor the shape of all its parts."""
    return {name: f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for name, one in state.items()}


def _find_differences(kind: str, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """In what a checkpoint is of another model; the first of them."""
    found = [
        f"{kind}{name} is {saved.get(name, 'missing')} in the checkpoint and {wanted.get(name, 'missing')} here"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name, "missing") != wanted.get(name, "missing") and not name.startswith(OF_RANK)
    ]
    return found[:_SHOWN] + ([f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])


def _read_run(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The entry beside the tensors, and what tensors there are; on the first rank."""
    from torch.distributed import checkpoint as dcp

    entry = {_RUN: ""}
    reader = dcp.FileSystemReader(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # this rank alone: as intended
        dcp.load(entry, storage_reader=reader, no_dist=True)
    return json.loads(entry[_RUN]), _describe_stored(reader.read_metadata().state_dict_metadata)


def _find_damage(path: Path, wanted: list[int]) -> str:
    """What is wrong with a file that has the given bytes and CRC-32; empty where nothing is."""
    try:
        seen = measure_file(path)
    except OSError as fault:
        return f"{path.name} cannot be read ({fault.strerror})"
    if seen[0] != wanted[0]:
        return f"{path.name} has {seen[0]} bytes of {wanted[0]}"
    return "" if seen == wanted else f"{path.name} has other bytes than were written"


def measure_file(path: Path) -> list[int]:
    """[bytes, CRC-32]."""
    size = crc = 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


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
    for stale in folder.glob(f"{_ASIDE}*"):  # of a run that was killed while it wrote
        shutil.rmtree(stale, ignore_errors=True)
    name = f"step-{step:08d}-{secrets.token_hex(4)}"
    (folder / f"{_ASIDE}{name}").mkdir()
    return name


def _commit(folder: Path, name: str, files: Mapping[str, list[int]], keep: int) -> None:
    """On the first rank, after all files are written."""
    aside, path = folder / f"{_ASIDE}{name}", folder / name
    try:
        _refuse_other_disks(aside, files)
        metadata = aside / ".metadata"
        write_whole(aside / _CHECKSUMS, json.dumps({**files, metadata.name: measure_file(metadata)}))
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


def _refuse_other_disks(aside: Path, files: Mapping[str, list[int]]) -> None:
    """What other ranks wrote is seen from here."""
    if lacking := sorted(file for file in files if not (aside / file).exists()):
        raise CheckpointNotSaved(
            f"the checkpoint was not saved: of {len(files)} files that ranks wrote, the first rank does not see "
            f"{', '.join(lacking[:3])}. Likely cause: {aside.parent} is no folder that all hosts share. Next step: "
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


def _find_latest(folder: Path) -> tuple[Path, dict[str, list[int]]]:
    """The latest checkpoint, and file -> [bytes, CRC-32]."""
    path = folder / read_latest(folder)
    try:
        files = json.loads((path / _CHECKSUMS).read_text(encoding="utf-8"))
        return path, {str(name): [int(size), int(crc)] for name, (size, crc) in files.items()}
    except (OSError, ValueError, TypeError, AttributeError) as fault:
        raise WrongCheckpoint(
            f"{path / _CHECKSUMS} cannot be read: {fault}. Likely cause: a copy that was cut short, or a folder that "
            "is no checkpoint. Next step: copy it again, or take an older checkpoint.",
            (str(fault),),
        ) from fault


def _from_all(value: Any) -> list[Any]:
    """A value of every rank."""
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def _from_first(action: Callable[[], Any], stage: str, word: Callable[[str], TrainingError] | None = None) -> Any:
    """What the first rank's action gave, or its fault, on all ranks; `word` makes an error of any other exception."""
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
