"""Sentences about one parameter, or one field of a recipe: gone, renamed, required, passed otherwise."""

from __future__ import annotations

from typing import Literal, assert_never

from ...canary.static.findings import ChangeKind, Finding
from ...evidence.values import Cause
from .subject import Sentences, at_call_sites, parameter, quote, series, stay, subject

ParameterKind = Literal[
    ChangeKind.PARAMETER_REMOVED,
    ChangeKind.PARAMETER_RENAMED,
    ChangeKind.PARAMETER_REORDERED,
    ChangeKind.PARAMETER_REQUIRED,
    ChangeKind.PARAMETER_KEYWORD_ONLY,
    ChangeKind.PARAMETER_POSITIONAL_ONLY,
]


def say_parameter(kind: ParameterKind, finding: Finding, old: str) -> Sentences:
    """The sentences for a change to a parameter; `old` is the release to stay on."""
    match kind:
        case ChangeKind.PARAMETER_REMOVED:
            say = _removed
        case ChangeKind.PARAMETER_RENAMED:
            say = _renamed
        case ChangeKind.PARAMETER_REORDERED:
            say = _reordered
        case ChangeKind.PARAMETER_REQUIRED:
            say = _required
        case ChangeKind.PARAMETER_KEYWORD_ONLY:
            say = _keyword_only
        case ChangeKind.PARAMETER_POSITIONAL_ONLY:
            say = _positional_only
        case _:
            assert_never(kind)
    return say(finding, old)


def _passing_fails(finding: Finding) -> str:
    # Recipes are dataclasses that take a field they do not know and drop it: no error tells of it.
    if finding.cause is Cause.SILENT_FALLBACK:
        return f"The call passes {parameter(finding)}, and it is silently ignored: no error, and no effect."
    return f"The call passes {parameter(finding)}, so it raises TypeError."


def _bare(name: str) -> str:
    """A name as it stands in a call, `recipe=`."""
    return f"`{name}=`" if name.isidentifier() else quote(name, "the keyword")


def _removed(finding: Finding, old: str) -> Sentences:
    name, what = subject(finding), parameter(finding)
    return Sentences(
        f"{name} no longer takes {what}",
        _passing_fails(finding),
        f"The call may pass {what}, depending on how it is made; where it does, it fails or is ignored.",
        "The bridge does not pass it.",
        f"{at_call_sites(finding)}do not pass {what}"
        + (f"; {quote(finding.suggestion)} is the likely new way" if finding.suggestion else "")
        + f"; {stay(old)} if what it asks for is needed",
    )


def _renamed(finding: Finding, old: str) -> Sentences:
    new = finding.suggestion or finding.new
    return Sentences(
        f"{subject(finding)} takes {quote(new, 'another name')} where it took {parameter(finding)}",
        _passing_fails(finding),
        "The old keyword still works, and a later release may drop it.",
        "The bridge passes it by position, or not at all.",
        f"{at_call_sites(finding)}rename {_bare(finding.parameter)} to {_bare(new)} "
        f"(keep both ways while {series(old)} is in the matrix)",
    )


def _reordered(finding: Finding, old: str) -> Sentences:
    name = subject(finding)
    what = f", {parameter(finding)} among them" if finding.parameter else ""
    return Sentences(
        f"{name} takes its parameters in another order{what}",
        "What the call passes by position lands in other parameters: TypeError, or wrong numbers.",
        "The call passes some of them by position; those before the change still land where they should.",
        "The bridge passes by keyword what moved.",
        f"{at_call_sites(finding)}pass {parameter(finding) if finding.parameter else 'them'} by keyword, "
        f"which works in {series(old)} too",
    )


def _required(finding: Finding, old: str) -> Sentences:
    default = finding.old.removeprefix(f"{finding.parameter}=")
    was = f" (the default was {quote(default)})" if default else ""
    return Sentences(
        f"{subject(finding)} now requires {parameter(finding)}{was}",
        f"The call does not pass {parameter(finding)}, so it raises TypeError.",
        f"The call may leave out {parameter(finding)}, depending on how it is made.",
        "The bridge already passes it.",
        f"{at_call_sites(finding)}pass {parameter(finding)}"
        + (f"; {quote(default)} is what {series(old)} took by itself" if default else ""),
    )


def _keyword_only(finding: Finding, old: str) -> Sentences:
    return Sentences(
        f"{subject(finding)} takes {parameter(finding)} by keyword only",
        f"The call passes {parameter(finding)} by position, so it raises TypeError.",
        f"The call may pass {parameter(finding)} by position, depending on how it is made.",
        "The bridge already passes it by keyword, or not at all.",
        f"{at_call_sites(finding)}pass {_bare(finding.parameter)} by keyword; {series(old)} takes that too",
    )


def _positional_only(finding: Finding, old: str) -> Sentences:
    return Sentences(
        f"{subject(finding)} takes {parameter(finding)} by position only",
        _passing_fails(finding),
        f"The call may pass {parameter(finding)} by keyword, depending on how it is made.",
        "The bridge already passes it by position, or not at all.",
        f"{at_call_sites(finding)}pass {parameter(finding)} by position, which works in {series(old)} too",
    )
