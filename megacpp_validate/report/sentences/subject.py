"""How a sentence names things: the symbol, its parameter, a piece of source, a place, a release."""

from __future__ import annotations

from typing import NamedTuple

from ...canary.static.findings import Finding
from ...evidence.values import SourceLine

_LONGEST_QUOTE = 120
_MOST_PLACES = 3


class Sentences(NamedTuple):
    """All that is said about one kind of change; `breaking`, `risk` and `harmless` are its consequences."""

    headline: str
    breaking: str
    risk: str
    harmless: str
    next_step: str


def quote(text: str, otherwise: str = "it") -> str:
    """A piece of source as one quoted line; `otherwise` where there is none. Backticks are the quotes."""
    line = " ".join(text.replace("`", "'").split())
    if not line:
        return otherwise
    return f"`{line}`" if len(line) <= _LONGEST_QUOTE else f"`{line[: _LONGEST_QUOTE - 1]}…`"


def short(dotted: str) -> str:
    """The last part of a dotted name."""
    return dotted.rpartition(".")[2]


def subject(finding: Finding) -> str:
    """The symbol as the bridge's code calls it, with the member in question."""
    name = short(finding.symbol)
    return quote(f"{name}.{finding.member}" if finding.member else name, "a symbol")


def parameter(finding: Finding) -> str:
    """The parameter in question."""
    return quote(finding.parameter, "a parameter")


def successor(finding: Finding) -> str:
    """The likely new name, quoted; empty if none was found."""
    return quote(short(finding.suggestion), "")


def place(line: SourceLine) -> str:
    """`file:line`, as editors and terminals take it."""
    return f"{line.file}:{line.line}"


def at_call_sites(finding: Finding) -> str:
    """Where to go, as the beginning of a next step; empty where no call site is known."""
    places = [place(site) for site in finding.call_sites]
    if not places:
        return ""
    more = len(places) - _MOST_PLACES
    return ", ".join(places[:_MOST_PLACES]) + (f" and {more} more" if more > 0 else "") + ": "


def series(version: str) -> str:
    """The release line of a version, "2.8" of "2.8.0"; words where there is no version."""
    return ".".join(version.split(".")[:2]) if version else "the old release"


def stay(version: str) -> str:
    """The advice not to upgrade yet."""
    return f"stay on {series(version)}.x" if version else "stay on the old release"
