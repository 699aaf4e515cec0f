"""A result as JSON: the model as it is, for programs; the words are in the other formats."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from megacpp_validate.text import CONTROL


def render_json(result: BaseModel) -> str:
    """Two spaces, keys sorted, a line end; the same text for the same result, and nothing that steers a terminal."""
    return dump_json(result.model_dump(mode="json"), sort_keys=True)


def dump_json(data: Any, *, sort_keys: bool = False) -> str:
    """JSON in which no text steers a terminal or is a command of GitHub's log."""
    text = json.dumps(data, indent=2, sort_keys=sort_keys, ensure_ascii=False)
    text = CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return text.replace("##[", "#\\u0023[") + "\n"
