"""Which torch headers an extension was compiled against, told by the assertions that it took from them.

A failed assertion of torch names its header and line, so the text lies in every extension that inlines torch's code.
Where the headers beside the torch that is there have no such assertion at that line, the extension was compiled
against others. sgl-deep-gemm 0.1.7 shows what that does: compiled with torch 2.13, whose tensors are 8 bytes smaller
before their sizes than those of 2.11 (`PyObjectSlot` lost a member), it loads with 2.11 and reads every size wrongly.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from ..evidence.doctor_look import Headers

_SAID: Final = b' INTERNAL ASSERT FAILED at "'
_PLACE: Final = re.compile(rb'[^"\0]{0,400}?/torch/include/([^"\0]{1,200})":(\d{1,6})')
_LONGEST: Final = 600  # bytes of a condition
_ASSERTION: Final = re.compile(r"\bTORCH_INTERNAL_ASSERT(?:_DEBUG_ONLY)?\(")
_COMMENT: Final = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def compare_headers(image: bytes | mmap.mmap, include: Path) -> Headers:
    """Hold the assertions of a compiled file against the headers in `include`; one that is not there says nothing."""
    compared, moved = 0, []
    for condition, name, number in _find_sites(image):
        assertions = _read_assertions(include / name)
        if assertions is None:
            continue
        compared += 1
        wanted = _squeeze(condition)
        if not any(first <= number <= last and _is_of(text, wanted) for first, last, text in assertions):
            moved.append(f"{name}:{number}")
    return Headers(compared, tuple(sorted(set(moved))))


def _find_sites(image: bytes | mmap.mmap) -> Iterator[tuple[str, str, int]]:
    """Condition, header and line of every assertion; by plain search, because a library may have half a gigabyte."""
    at = image.find(_SAID)
    while at >= 0:
        after = at + len(_SAID)
        if place := _PLACE.match(image[after : after + _LONGEST]):
            start = image.rfind(b"\0", max(0, at - _LONGEST), at) + 1
            yield image[start:at].decode(errors="replace"), place[1].decode(errors="replace"), int(place[2])
        at = image.find(_SAID, after)


@cache
def _read_assertions(header: Path) -> tuple[tuple[int, int, str], ...] | None:
    """First and last line of every assertion of a header, and what stands between its brackets."""
    try:
        text = header.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    text = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)  # lines keep their numbers
    found = []
    for match in _ASSERTION.finditer(text):
        end, depth = match.end(), 1
        while depth and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        first, last = (text.count("\n", 0, place) + 1 for place in (match.start(), end))
        found.append((first, last, _squeeze(text[match.end() : end - 1])))
    return tuple(found)


def _is_of(text: str, condition: str) -> bool:
    """Whether an assertion is of this condition: alone, or followed by its message."""
    return text.startswith(condition) and text[len(condition) : len(condition) + 1] in ("", ",")


def _squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text)
