"""What a person writes for the axes of a search, as values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.version import InvalidVersion, Version

from ...canary.dynamic.bisect_result import TE, Axis

_FORM: Final = "NAME=VALUE:DIR,VALUE:DIR, from the good end to the bad one; VALUE: with no folder is what the host has"
_NAME: Final = re.compile(r"[a-z][a-z0-9-]*")


class AxisInvalid(ValueError):
    """What a person wrote is no axis; the text says the form."""


@dataclass(frozen=True)
class AxisSpec:
    """An axis other than Transformer Engine.

    Attributes:
        folders: by value: the site folder that is put before all others; None where the host's own is meant.
    """

    axis: Axis
    folders: dict[str, Path | None]


def read_axes(texts: Sequence[str]) -> tuple[AxisSpec, ...]:
    """Every axis that was written.

    Raises:
        AxisInvalid: one has another form, no two values, a name or a value twice, or a folder that is not there.
    """
    specs = tuple(_read_axis(text) for text in texts)
    names = [spec.axis.name for spec in specs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise AxisInvalid(f"--axis {twice[0]} is given twice. Next step: write all its values in one.")
    return specs


def order_releases(known: Sequence[str], good: str, bad: str, usable: Sequence[str] | None = None) -> Axis:
    """Transformer Engine as an axis: every release from GOOD to BAD, and which of them are not usable.

    Args:
        known: every release that there is.
        good, bad: the ends, in either order of age.
        usable: those that there is an environment for; None for all.

    Raises:
        AxisInvalid: GOOD or BAD is no version.
    """
    by_version = {_version(name): name for name in (*known, *(usable or ()), good, bad)}  # 2.9 and 2.9.0 are one
    ends = _version(good), _version(bad)
    between = sorted(version for version in by_version if min(ends) <= version <= max(ends))
    if ends[0] > ends[1]:
        between.reverse()
    there = None if usable is None else {_version(name) for name in usable}
    absent = [version for version in between[1:-1] if there is not None and version not in there]
    return Axis(
        name=TE,
        values=tuple(by_version[version] for version in between),
        absent=tuple(by_version[version] for version in absent),
    )


def _read_axis(text: str) -> AxisSpec:
    name, _, rest = text.partition("=")
    pairs = [part.partition(":") for part in rest.split(",")]
    values = [value for value, _, _ in pairs]
    if (
        not _NAME.fullmatch(name)
        or name == TE
        or len(pairs) < 2
        or not all(value and colon for value, colon, _ in pairs)
    ):
        raise AxisInvalid(f"{text!r} is no axis. Next step: write {_FORM}.")
    if len(set(values)) < len(values):
        raise AxisInvalid(f"{text!r} has a value twice. Next step: write {_FORM}.")
    folders = {value: Path(folder) if folder else None for value, _, folder in pairs}
    if missing := [str(folder) for folder in folders.values() if folder is not None and not folder.is_dir()]:
        raise AxisInvalid(f"--axis {name}: there is no folder {', '.join(missing)}. Next step: write {_FORM}.")
    return AxisSpec(Axis(name=name, values=tuple(values)), folders)


def _version(name: str) -> Version:
    try:
        return Version(name)
    except InvalidVersion as fault:
        raise AxisInvalid(
            f"{name!r} is no release. Next step: give versions such as 2.17.1; a folder has no order to search in."
        ) from fault
