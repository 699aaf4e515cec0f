"""Names of a site's pages: made from names of others, and never a way out of its folder."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Final

_LONGEST: Final = 60
_PAGE: Final = re.compile(r"(?:[a-z][a-z0-9_-]*/)?[a-z0-9][a-z0-9._-]*\.(?:html|css|js)")


def cell_page(cell: str) -> str:
    """The page of a cell."""
    return _name("cell", cell)


def target_page(target: str) -> str:
    """The page of a target."""
    return _name("target", target)


def stack_page(target: str, stack: str) -> str:
    """The page of a stack whose cells have none of their own."""
    return _name("stack", target, stack)


def result_page(file: str) -> str:
    """The page of a result of another verb, by its file below the store."""
    return _name("result", file)


def step_page(target: str, before: str, after: str) -> str:
    """The page of the step from one stack to another."""
    return _name("step", target, before, after)


def is_page(path: str) -> bool:
    """Whether a path is one that a site writes: a file of its folder, or of one folder in it."""
    return _PAGE.fullmatch(path) is not None and ".." not in path


def _name(folder: str, *words: str) -> str:
    """A name that a person recognises, and a hash that keeps it apart from every other.

    Lower case alone: there are file systems to which two names that differ in case are one.
    """
    digest = sha256("\0".join(words).encode("utf-8", "backslashreplace")).hexdigest()[:10]
    shown = re.sub(r"[^a-z0-9._]+|\.{2,}", "-", "-".join(words).lower())[:_LONGEST].strip("-._")
    return f"{folder}/{shown}-{digest}.html" if shown else f"{folder}/{digest}.html"
