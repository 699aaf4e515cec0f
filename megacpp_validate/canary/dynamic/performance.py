"""Whose slowdown it is: a module that became slower, and those that stand on it and are slower by it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .blame import Order
from .entries import SHARED_PARTS, of_module
from .explain import FIREWALL
from .slowdown import HOST
from .upgrade_result import TimingChange

_LOW: Final = frozenset({"fp8", "delayed", "current", "block", "mxfp8", "nvfp4"})
_HIGH: Final = frozenset({"fp32", "bf16", "fp16"})


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


def file_slow(
    own: Sequence[TimingChange], order: Order, red: Mapping[str, str], timed: Sequence[TimingChange] = ()
) -> tuple[Slow, ...]:
    """Every slower module filed under the first that it stands on and that is slower in the same way.

    Args:
        own: rows that are slower beyond the noise and beyond what all share.
        red: red modules -> the module that each is filed under: what is red is not slow as well, and what stands on it
            may be slow by taking another path.
        timed: every row: what is timed and not slower tells what a slower one is slower by.
    """
    rows: dict[str, list[TimingChange]] = {}
    for row in own:
        if row.module not in red:
            rows.setdefault(row.module, []).append(row)
    held = frozenset((row.module, row.name) for row in timed if row.noise and not row.slower)
    slow: dict[str, list[str]] = {}
    for module in sorted(rows, key=order.rank):
        if any(order.depends(module, other) and _share(module, other) for other in red if other != FIREWALL):
            continue
        cause = next(
            (one for one in slow if order.depends(module, one) and _slows(one, rows[one], module, rows, held)), None
        )
        if cause is None:
            slow[module] = []
        else:
            slow[cause].append(module)
    return tuple(Slow(module, tuple(rows[module]), tuple(others)) for module, others in slow.items())


def _slows(
    cause: str, its: Sequence[TimingChange], module: str, rows: Mapping[str, Sequence[TimingChange]],
    held: frozenset[tuple[str, str]],
) -> bool:  # fmt: skip
    """Whether what is slower in one module makes every row of another slower."""
    if cause != FIREWALL and not _share(cause, module) and not _share_part(cause, its, module, held):
        return False
    # What the scope costs the host is paid by whatever is run in it, on the device too, which waits for the host.
    low = all(_is_low(row.name) for row in its)
    backward = all(_is_of_backward(row, held) for row in its)
    return all(
        (cause != FIREWALL or row.name.endswith(HOST) or _is_low(row.name))
        and (_is_low(row.name) or not low)
        and (not backward or "backward" in _words(row))
        for row in rows[module]
    )


def _share_part(
    cause: str, its: Sequence[TimingChange], module: str, held: frozenset[tuple[str, str]]
) -> bool:  # fmt: skip
    """Whether both run one part of Transformer Engine, and no use of the device that runs it is as fast as it was.

    As of numbers that are wrong (shared_layers.py): every entry point that runs the shared code must show it.
    """
    mine, theirs = (of_module(name) or frozenset() for name in (cause, module))
    low = all(_is_low(row.name) for row in its)
    for part in SHARED_PARTS:
        if not (part.shows & mine and part.shows & theirs):
            continue
        fast = (
            name
            for other, name in held
            if part.shows & (of_module(other) or frozenset()) and not name.endswith(HOST)
            and (not low or _is_low(name))
        )  # fmt: skip
        if not any(fast) and part.shows & mine == mine:
            return True
    return False


def _is_of_backward(row: TimingChange, held: frozenset[tuple[str, str]]) -> bool:
    """Whether the backward pass alone is slower: a use of both passes is where its forward pass by itself is not."""
    words = _words(row)
    if "backward" not in words:
        return False
    alone = row.name.replace("forward-backward", "forward")
    return "forward" not in words or (row.module, alone) in held


def _share(one: str, other: str) -> bool:
    mine, theirs = of_module(one), of_module(other)
    return mine is None or theirs is None or bool(mine & theirs)


def _words(row: TimingChange) -> frozenset[str]:
    return frozenset(re.split(r"[.-]", row.name))


def _is_low(name: str) -> bool:
    """Whether a use is of a low precision: of "bf16.block.forward" the block is no recipe."""
    words = frozenset(re.split(r"[.-]", name))
    return bool(words & _LOW) and not words & _HIGH
