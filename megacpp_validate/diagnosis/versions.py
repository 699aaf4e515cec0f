"""What else than the release changed between two stacks, as their processes had it loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Final, NamedTuple

from ..evidence.receipt import Library, Outcome, Receipt
from ..evidence.values import Frozen
from .rows import component_named, loaded_as

TE: Final = "transformer_engine"
_OWN: Final = frozenset({TE, "transformer_engine_torch", "libtransformer_engine"})
_WHOLE: Final = frozenset({Outcome.PASS, Outcome.FAIL, Outcome.EXPECTED_UNSUPPORTED})  # ran to its end
_OTHER_NAMES: Final = {"cuda": "CUDA runtime"}
_MACHINE: Final = ("torch", "cuda", "driver", "python", "gpu")

Receipts = Mapping[str, Receipt]
"""Receipts of one stack by module."""


class VersionChange(Frozen):
    """A package or library as loaded that is not the same on both sides; empty where it was not loaded."""

    name: str
    before: str
    after: str


class Second(NamedTuple):
    """A library or package that is there twice.

    Attributes:
        kept: the copy that lies where torch or the package index put it, or the one that is loaded.
        others: the rest.
    """

    name: str
    kept: str
    others: tuple[str, ...]


def compare_versions(before: Receipts, after: Receipts) -> tuple[VersionChange, ...]:
    """Packages and libraries as loaded, torch, CUDA, the driver, Python and the GPU, where they are not the same.

    Only cells that ran to their end on both sides are compared: one that died half way had not loaded all it would. Of
    the others, what has one version on either side is. Transformer Engine itself is the release, and not in it.
    """
    found: dict[str, tuple[str, str]] = {}
    for probe in sorted(before.keys() & after.keys()):
        one, other = before[probe], after[probe]
        whole = one.outcome in _WHOLE and other.outcome in _WHOLE
        mine, theirs = _loaded(one), _loaded(other)
        for name in sorted(mine.keys() | theirs.keys()):
            old, new = mine.get(name, ""), theirs.get(name, "")
            single = bool(old) and bool(new) and ", " not in f"{old}{new}"
            if old != new and (single or (whole and bool(mine) and bool(theirs))):
                found.setdefault(name, (old, new))
    return tuple(VersionChange(name=name, before=old, after=new) for name, (old, new) in sorted(found.items()))


def changed_components(versions: tuple[VersionChange, ...]) -> tuple[str, ...]:
    """Components that are of another version, each once; what was only loaded on one side is none."""
    names = (
        loaded_as(row.name) or _OTHER_NAMES.get(row.name, row.name) for row in versions if row.before and row.after
    )
    return tuple(dict.fromkeys(name for name in names if name != "gpu"))


def release_of(receipts: Receipts) -> str:
    """The release of Transformer Engine, as loaded, else as the stack is named; empty where neither tells."""
    for _, receipt in sorted(receipts.items()):
        for package in receipt.packages:
            if package.name == TE and package.version:
                return package.version
    stacks = (re.match(r"te(\d+(?:\.\w+)+)", receipt.stack) for _, receipt in sorted(receipts.items()))
    return next((found[1] for found in stacks if found), "")


def version_of(component: str, receipt: Receipt) -> str:
    """The version of a component that a receipt says was loaded; empty where it says none."""
    found = _loaded(receipt)
    return next((found[name] for name in component_named(component).loaded if found.get(name)), "")


def cuda_major(receipt: Receipt) -> str:
    """Such as "13"; empty where the receipt does not tell."""
    said = re.match(r"(\d+)", receipt.machine.cuda) or re.search(r"\+cu(\d\d)", receipt.machine.torch)
    return said[1] if said else ""


def second_copies(receipt: Receipt, component: str) -> tuple[Second, ...]:
    """Libraries and packages of a component of which this process had more than one file."""
    names = component_named(component).loaded
    found = [second for library in receipt.libraries if library.name in names if (second := _second(library))]
    found += [
        Second(package.name, package.file, package.other_copies)
        for package in receipt.packages
        if package.name in names and package.other_copies
    ]
    return tuple(found)


def _second(library: Library) -> Second | None:
    files = list(dict.fromkeys(library.files))
    if len(files) < 2:
        return None
    # What pip put beside torch is what torch was built for.
    kept = next((file for file in files if "/nvidia/" in file), next((f for f in files if "/torch/" in f), files[0]))
    return Second(library.name, kept, tuple(file for file in files if file != kept))


def _loaded(receipt: Receipt) -> dict[str, str]:
    if not receipt.packages and not receipt.libraries and not receipt.machine.torch:
        return {}
    found = {package.name: package.version for package in receipt.packages if package.name not in _OWN}
    found |= {library.name: library.version for library in receipt.libraries if library.name not in _OWN}
    machine = {name: str(getattr(receipt.machine, name)) for name in _MACHINE}
    return {name: version for name, version in (found | {k: v for k, v in machine.items() if v}).items() if version}


def shorter(path: str) -> str:
    """The end of a path, enough to find it by."""
    parts = PurePath(path).parts
    return path if len(parts) <= 4 else str(PurePath("...", *parts[-4:]))
