"""Text of others without what a page must not hold."""

from __future__ import annotations

import re
from typing import Final

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def strip_control(text: str) -> str:
    """The text without control characters and marks of direction; tabs and line ends stay."""
    return _CONTROL.sub("", text)
