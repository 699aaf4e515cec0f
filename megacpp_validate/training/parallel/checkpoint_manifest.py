"""What a checkpoint says of itself, and in what it differs from a model that would take it."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from ..errors import TrainingError

OF_RANK: Final = "rank/"  # tensors of one rank and its build, which another world has no use for
_SHOWN: Final = 6
_TENSOR: Final = re.compile(r"\w+\[(\d+(, \d+)*)?\]", re.ASCII)
_CHUNK: Final = 1 << 22


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


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: steps that were done.
        world: ranks that wrote it.
        identity: of the model.
        tensors: name -> dtype and whole shape, as in "float32[4, 8]".
        plain: values beside the tensors.
        files: name -> [bytes, CRC-32].
    """

    step: int
    world: int
    identity: Mapping[str, Any]
    tensors: Mapping[str, str]
    plain: Mapping[str, Any]
    files: Mapping[str, list[int]]


def read_manifest(path: Path) -> Manifest:
    """Read it.

    Raises:
        WrongCheckpoint: it is not there, cut short, or no manifest; every field that is none is named.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(given, dict) or given.keys() != {field.name for field in fields(Manifest)}:
            raise ValueError("other fields than a manifest's")
        if wrong := list(_wrong_fields(given)):
            raise ValueError("; ".join(wrong))
    except (OSError, ValueError, RecursionError) as fault:
        raise WrongCheckpoint(
            f"the manifest {path} cannot be read: {fault}. Likely cause: a copy that was cut short, or a folder that "
            "is no checkpoint. Next step: copy it again, or take an older checkpoint.",
            (str(fault),),
        ) from fault
    return Manifest(**given)


def _wrong_fields(given: Mapping[str, Any]) -> Iterator[str]:
    """Fields of a manifest that have other values than one can have."""
    for name, least in (("step", 0), ("world", 1)):
        if type(given[name]) is not int or given[name] < least:  # true is an int
            yield f"{name} is {_shorten(given[name])}, and is a whole number from {least} on"
    for name in ("identity", "tensors", "plain", "files"):
        if not isinstance(given[name], dict):
            yield f"{name} is {_shorten(given[name])}, and is an object"
    tensors, files = (given[name] if isinstance(given[name], dict) else {} for name in ("tensors", "files"))
    for name, said in tensors.items():
        if not isinstance(said, str) or not _TENSOR.fullmatch(said):
            yield f"tensor {name} is {_shorten(said)}, and is a dtype and a shape"
    for name, measured in files.items():
        if name in ("", "..") or Path(name).name != name or "\0" in name:
            yield f"file {_shorten(name)} is not in the folder"
        elif not isinstance(measured, list) or [type(number) for number in measured] != [int, int]:
            yield f"file {name} is {_shorten(measured)}, and is [bytes, CRC-32]"


def _shorten(value: Any) -> str:
    return repr(value)[:80]


def describe_tensors(state: Mapping[str, Any]) -> dict[str, str]:
    """Name -> dtype and whole shape; of a DTensor that of all its parts."""
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in sorted(state.items())}
    return {name: f"{dtype}{list(state[name].shape)}" for name, dtype in dtypes.items()}


def find_differences(manifest: Manifest, identity: Mapping[str, Any], tensors: Mapping[str, str]) -> list[str]:
    """In what a checkpoint is of another model: in its identity first, then in its tensors; the first of each."""
    given = json.loads(json.dumps(dict(identity)))  # a tuple is a list in the file
    saved, wanted = (
        {name: said for name, said in some.items() if not name.startswith(OF_RANK)}
        for some in (manifest.tensors, tensors)
    )
    return _differences("", manifest.identity, given) + _differences("tensor ", saved, wanted)


def _differences(kind: str, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    found = [
        f"{kind}{name} is {saved.get(name, 'missing')} in the checkpoint and {wanted.get(name, 'missing')} here"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name, "missing") != wanted.get(name, "missing")
    ]
    return found[:_SHOWN] + ([f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])


def find_damage(path: Path, wanted: list[int]) -> str:
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
