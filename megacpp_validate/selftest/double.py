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


class DoubleTooLate(RuntimeError):
    """This process has already decided about another Transformer Engine."""


def use_te_double() -> None:
    """Put the double first on `sys.path` and let wrappers take it for tensors on the CPU, whose recipes it emulates.

    Call it before the first question to `bridge.imports`. It lasts as long as the process.

    Raises:
        FileNotFoundError: this is an installed package; the stand-in is in the repository alone.
        DoubleTooLate: the bridge has decided about Transformer Engine, or another one is imported.
    """
    if not FOLDER.is_dir():
        raise FileNotFoundError(f"{FOLDER} does not exist. Next step: run this in a checkout of the repository.")
    loaded = sys.modules.get("transformer_engine")
    real = loaded is not None and not str(getattr(loaded, "__file__", "")).startswith(str(FOLDER))
    if te.TE._verdict is not None or real:
        raise DoubleTooLate(
            "the bridge has decided about Transformer Engine before its double was asked for. Likely cause: a wrapper "
            "was made, or is_te_available() was asked, earlier in this process. Next step: call use_te_double() first."
        )
    sys.path.insert(0, str(FOLDER))
    features.TE_DEVICES = frozenset({*features.TE_DEVICES, "cpu"})  # type: ignore[misc]
    recipes.TARGETS["cpu"] = CPU


def entries() -> dict[str, Entry[Any]]:
    """Every accessor of `bridge.imports` by name."""
    return {name: value for name, value in vars(te).items() if isinstance(value, Entry)}
