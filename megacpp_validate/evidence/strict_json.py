"""What a JSON text may hide from a reader: a key that is there twice, numbers that JSON has not, more than is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .json_text import read_json


def refuse_what_json_hides(text: str | bytes) -> None:
    """Refuse a key that is there twice, of which one counts, numbers that JSON does not have, and what no reader reads.

    Raises:
        ValueError: one of them, by name.
    """
    read_strict_json(text)


def read_strict_json(text: str | bytes) -> Any:
    """The value of a JSON text that hides nothing.

    Raises:
        ValueError: it is no JSON, has a key twice in one object, a number that JSON does not have, or is nested deeper
            than Python reads.
    """
    return read_json(text, object_pairs_hook=_once_each, parse_constant=_finite, parse_float=_finite)


def _once_each(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is there twice in one object")
        found[key] = value
    return found


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"the number {text} is none that is finite")
    return number
