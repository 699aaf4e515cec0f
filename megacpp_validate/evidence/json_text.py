"""The value of a JSON text, whoever wrote it. Standard library only."""

from __future__ import annotations

import json
from typing import Any


def read_json(text: str | bytes, **hooks: Any) -> Any:
    """The value of a text.

    Args:
        text: JSON.
        hooks: of `json.loads`.

    Raises:
        ValueError: it is no JSON, is refused by a hook, or is nested deeper than Python reads.
    """
    try:
        return json.loads(text, **hooks)
    except RecursionError as fault:
        raise ValueError("it is nested too deep") from fault
