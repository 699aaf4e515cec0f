"""Which damaged installs a run of the firewall tier takes, and which undamaged ones they lean on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from .damage import DAMAGES, PINNED, Damage

InstallMode = Literal["wheels", "current"]
_UNDAMAGED = "undamaged"


class UnknownCase(ValueError):
    """No case has this name, or there is no real install to damage; the text names what there is."""


def plan_firewall(only: Collection[str] = (), install: InstallMode = "wheels") -> tuple[Damage, ...]:
    """The cases of a run, undamaged installs first.

    A damaged install proves something only where the undamaged one is available, so the undamaged installs
    that the selected cases lean on are added. A real install is of one release: cases of another one are left
    out.
    """
    rows = {row.id: row for row in _rows(install)}
    if unknown := sorted(set(only) - rows.keys()):
        raise UnknownCase(
            f"no case of this tier is called {', '.join(unknown)} with install={install!r}. Next step: take "
            f"one of {', '.join(rows)}"
        )
    wanted = [row for row in rows.values() if not only or row.id in only]
    leaned_on = {baseline_of(row, install) for row in wanted if row.proves_nothing_alone}
    return tuple(row for row in rows.values() if row in wanted or row.id in leaned_on)


def is_baseline(row: Damage) -> bool:
    """Whether the case is an undamaged install."""
    return row.id.startswith(_UNDAMAGED)


def baseline_of(row: Damage, install: InstallMode) -> str:
    """Id of the case that is the undamaged install of the same release."""
    return f"{_UNDAMAGED}-{row.release or PINNED}" if install == "wheels" else _UNDAMAGED


def _rows(install: InstallMode) -> tuple[Damage, ...]:
    if install == "wheels":
        return DAMAGES
    pinned = next(row for row in DAMAGES if row.id == f"{_UNDAMAGED}-{PINNED}")
    others = (replace(row, extra=None) for row in DAMAGES if not row.release)  # everything comes from the install
    return (replace(pinned, id=_UNDAMAGED, release=""), *others)
