"""The answer in a sentence, and the counts."""

from __future__ import annotations

import re


def count(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def first_sentence(text: str) -> str:
    """The first sentence of a reason; a full stop inside a version or a file name does not end one."""
    line = " ".join(text.split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", line, maxsplit=1)[0]
