"""A double of Transformer Engine in plain torch, for the logic of wrappers on a CPU. It is not Transformer Engine.

Entry points and parameter names are those that `bridge.imports` and its callers use, as of 2.20. Any other keyword is a
TypeError, and what the double does not do is a NotImplementedError.
FP8 is emulated by rounding to torch's float8 types. No number measured with it says anything about a GPU: its version,
`0.0.0+double`, says so in every receipt.

Use it through `megacpp_validate.selftest.plant.use_te_double()`, or the pytest fixture `te_double`.
"""

from __future__ import annotations

import sys
from types import ModuleType

from . import recipes

__version__ = "0.0.0+double"


def _place_recipes() -> None:
    """Make `transformer_engine.common.recipe` importable; the house has no folders of that name."""
    place = ModuleType(f"{__name__}.common", "Holds `recipe`, as in Transformer Engine.")
    place.__path__ = []
    place.recipe = recipes  # type: ignore[attr-defined]
    sys.modules[place.__name__] = place
    sys.modules[f"{place.__name__}.recipe"] = recipes
    globals()["common"] = place


_place_recipes()
