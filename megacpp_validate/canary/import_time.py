"""What importing Transformer Engine asks of its surroundings: libraries, minimum versions, checks that raise."""

from __future__ import annotations

from collections.abc import Iterator

from .changes import Change
from .release import Release
from .surface import Symbol


def compare_import_time(old: Release, new: Release) -> Iterator[Change]:
    yield from ()


def deprecated_modules(release: Release, symbol: Symbol) -> str:
    return ""
