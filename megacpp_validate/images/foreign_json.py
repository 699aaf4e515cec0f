"""JSON that a registry, a builder or another tool has written."""

from __future__ import annotations

import json
from typing import Any


def read_json(text: str | bytes) -> Any:
    """The value of a text.

    Raises:
        ValueError: it is no JSON, or is nested deeper than Python reads.
    """
    try:
        return json.loads(text)
    except RecursionError as fault:
        raise ValueError("it is nested too deep") from fault
