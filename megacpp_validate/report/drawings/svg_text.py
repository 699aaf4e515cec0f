"""Text of others as a drawing may hold it: XML has no place for control characters and half characters."""

from __future__ import annotations

import re
from typing import Final

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def plain_label(text: str) -> str:
    """Text without them."""
    return _CONTROL.sub("", text)
