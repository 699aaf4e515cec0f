"""What a package index has: names of releases and their order, and why pip got nothing from it."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Sequence

from packaging.version import VERSION_PATTERN, Version

from ..errors import WrongArguments

_CAUSES = {  # pattern of what pip says -> likely cause
    r"ERROR.*(wheel .* is invalid|not a zip|has inconsistent|do not match the hash)": (
        "a mirror or proxy that serves an error page in place of the wheel"
    ),
    r"connection|timed? ?out|name resolution|unreachable|refused|ssl|proxy|temporary failure|max retries|"
    r"file or directory|\b40[137]\b|\b50\d\b": "the package index cannot be reached from here",
    "": "the index has no such package",
}


class UnknownRelease(WrongArguments):
    """There is no such release on the index; the text names the nearest ones."""


def sort_versions(names: Sequence[str]) -> list[str]:
    """Version names, oldest first; what is no version is left out."""
    return sorted((name.strip() for name in names if is_version(name)), key=Version)


def nearest(version: str, names: Sequence[str]) -> list[str]:
    """Up to four releases around the requested one."""
    ordered = sort_versions(names)
    at = bisect(ordered, Version(version), key=Version) if is_version(version) else len(ordered)
    return ordered[max(at - 2, 0) : at + 2]


def is_version(name: str) -> bool:
    """Whether a name is a version as PEP 440 has it."""
    return re.fullmatch(rf"\s*{VERSION_PATTERN}\s*", name, re.VERBOSE | re.IGNORECASE) is not None


def say_unreachable(what: str, said: str) -> str:
    """The error, its likely cause and the next step where pip could not fetch something."""
    cause = next(cause for pattern, cause in _CAUSES.items() if re.search(pattern, said, re.IGNORECASE))
    first = next((line for line in said.splitlines() if line.startswith("ERROR")), said).strip()[:300]
    return (
        f"{what} could not be fetched. pip said: {first or 'nothing.'} Likely cause: {cause}. Next step: look at "
        "`pip config list`, or give a folder that holds the package; what was fetched before works offline."
    )
