"""Faults that are planted in a run which must find them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .trainer import SmokeTrainer


def plant(name: str, trainer: SmokeTrainer) -> Callable[[SmokeTrainer], None] | None:
    """Plant a fault; what is to be called after each step, if anything."""
    del trainer
    if name:
        raise ValueError(f"there is no fault {name!r}")
    return None
