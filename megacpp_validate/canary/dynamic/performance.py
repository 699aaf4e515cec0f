"""Whose slowdown it is: a module that became slower, and those that stand on it and are slower by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...evidence.upgrade import TimingChange
from .blame import Order
from .entries import of_module
from .explain import FIREWALL
from .slowdown import HOST

_LOW = frozenset({"fp8", "delayed", "current", "block", "mxfp8", "nvfp4"})


@dataclass(frozen=True)
class Slow:
    """One module that became slower by itself.

    Attributes:
        others: modules that are slower by it.
        changes: its own rows.
    """

    module: str
    changes: tuple[TimingChange, ...]
    others: tuple[str, ...] = ()


def file_slow(own: Sequence[TimingChange], order: Order, red: Mapping[str, str]) -> tuple[Slow, ...]:
    """Every slower module filed under the first that it stands on and that is slower in the same way.

    Args:
        own: rows that are slower beyond the noise and beyond what all share.
        red: red modules -> the module that each is filed under: what is red is not slow as well, and what stands on it
            may be slow by taking another path.
    """
    rows: dict[str, list[TimingChange]] = {}
    for row in own:
        if row.module not in red:
            rows.setdefault(row.module, []).append(row)
    slow: dict[str, list[str]] = {}
    for module in sorted(rows, key=order.rank):
        if any(order.depends(module, other) and _share(module, other) for other in red if other != FIREWALL):
            continue
        cause = next((one for one in slow if order.depends(module, one) and _slows(one, rows[one], module, rows)), None)
        if cause is None:
            slow[module] = []
        else:
            slow[cause].append(module)
    return tuple(Slow(module, tuple(rows[module]), tuple(others)) for module, others in slow.items())


def _slows(cause: str, its: Sequence[TimingChange], module: str, rows: Mapping[str, Sequence[TimingChange]]) -> bool:
    """Whether what is slower in one module makes every row of another slower."""
    if cause != FIREWALL and not _share(cause, module):
        return False
    # What the scope costs the host is paid by whatever is run in it, on the device too, which waits for the host.
    low = all(_words(row) & _LOW for row in its)
    backward = all("backward" in _words(row) for row in its)
    return all(
        (cause != FIREWALL or row.name.endswith(HOST) or bool(_words(row) & _LOW))
        and (bool(_words(row) & _LOW) or not low)
        and (not backward or any("backward" in word for word in row.name.split(".")))
        for row in rows[module]
    )


def _share(one: str, other: str) -> bool:
    mine, theirs = of_module(one), of_module(other)
    return mine is None or theirs is None or bool(mine & theirs)


def _words(row: TimingChange) -> frozenset[str]:
    return frozenset(row.name.split("."))
