"""The low-precision scope as probes enter it, and what shows that something was computed in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..evidence.receipt import Part
from .bounds import SAFETY, Roundings

Enter = Callable[[], AbstractContextManager[Any]]
"""Makes the scope anew for each step."""


def low_precision_ran(error: float, roundings: Roundings, of: str = "") -> Part:
    """That an error is as large as low precision makes it: what is too accurate was not computed in it.

    Args:
        error: relative to the exact value, in the Euclidean norm.
        roundings: that must have been made.
        of: what it is the error of; nothing where the check's name says it.
    """
    floor = roundings.bound() / SAFETY / 2
    why = f"{of}: half the error that the roundings must make".removeprefix(": ")
    return Part("low-precision-ran", error, floor, error >= floor, why, at_least=True)
