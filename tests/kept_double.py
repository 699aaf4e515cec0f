"""The double of Transformer Engine: read once for all tests of a process, and found by each as it was when it was read.

To read its twenty files for each of a thousand tests is half a minute, and what is read is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

_kept: dict[str, ModuleType] = {}
_first: list[tuple[ModuleType | type, dict[str, Any]]] = []  # modules, their classes, and what each had at first


def keep_double() -> None:
    """Remember the modules that were imported, and what is in them; once is enough."""
    if _kept:
        return
    _kept.update(
        (name, module) for name, module in sys.modules.items() if name.partition(".")[0] == "transformer_engine"
    )
    for module in _kept.values():
        own = (one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__)
        _first.extend((place, _copy(vars(place))) for place in (module, *own))


def put_double() -> None:
    """Have it imported as it was at first; nothing where it never was."""
    for place, first in _first:
        for name in vars(place).keys() - first.keys():
            delattr(place, name)
        for name, value in _copy(first).items():
            if vars(place).get(name, place) is not value:
                setattr(place, name, value)
    sys.modules.update(_kept)


def _copy(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Containers, which may be filled, are copied; what Python itself made is not."""
    return {
        name: value.copy() if type(value) in {dict, list, set} and not name.startswith("_") else value
        for name, value in attributes.items()
    }
