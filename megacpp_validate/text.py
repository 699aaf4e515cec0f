"""Text of other people, made safe to show: the one sanitiser for every format. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Sized
from typing import Final

# What moves a cursor, colours, rings, turns the direction of text around, or cannot be written as UTF-8 or XML. Line
# ends and tabs are not among them.
CONTROL: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\ufffe\uffff]"
)
# What GitHub's log takes for a command: `::error` at the start of a line, and `##[error]` anywhere.
_COMMAND: Final = re.compile(r"(?m)^(\s*:)(?=:)|(#)(?=#\[)")


def clean(text: str) -> str:
    """The text without control characters, marks of direction and commands of GitHub's log; its lines stay lines."""
    return _COMMAND.sub(lambda found: f"{found[0]} ", CONTROL.sub("", text.replace("\r\n", "\n")))


def clean_line(text: str) -> str:
    """The same on one line: runs of white space become one space."""
    return clean(" ".join(CONTROL.sub("", re.sub(r"[\r\u2028\u2029]", " ", text)).split()))


def count(number: int | Sized, noun: str, plural: str = "") -> str:
    """A number and its noun: "1 cell", "3 cells"."""
    size = number if isinstance(number, int) else len(number)
    return f"{size} {noun if size == 1 else plural or noun + 's'}"


def first_sentence(text: str) -> str:
    """The first sentence of a reason; a full stop inside a version or a file name does not end one."""
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", " ".join(text.split()), maxsplit=1)[0]
