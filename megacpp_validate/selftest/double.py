"""Put the double of Transformer Engine in the place of the real one, in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

from ..bridge import features, recipes
from ..bridge import imports as te
from ..bridge.recipes import TargetRecipes
from ..bridge.vendor import Entry

FOLDER: Final = Path(__file__).resolve().parents[2] / "tests" / "te_double"  # of a checkout; a wheel has none
CPU: Final = TargetRecipes("cpu", "", ("delayed", "current", "block"), "delayed")


def use_te_double() -> None:
    """Put the double first on `sys.path` and let wrappers take it for tensors on the CPU, whose recipes it emulates.

    Call it before the first question to `bridge.imports`. It lasts as long as the process.
    """
    sys.path.insert(0, str(FOLDER))
    features.TE_DEVICES = frozenset({*features.TE_DEVICES, "cpu"})  # type: ignore[misc]
    recipes.TARGETS["cpu"] = CPU


def entries() -> dict[str, Entry[Any]]:
    """Every accessor of `bridge.imports` by name."""
    return {name: value for name, value in vars(te).items() if isinstance(value, Entry)}
