"""The words: what is said about a finding, and what a static tier cannot see.

Every match over a closed enumeration ends in `assert_never`: a new kind without words fails the type check.
In a sentence, backticks stand around what is code; each renderer shows them in its own way.
"""

from __future__ import annotations

from typing import NamedTuple, assert_never

from ...canary.static.findings import ChangeKind, Finding, Impact
from ..sentences.behaviour import say_behaviour
from ..sentences.parameters import say_parameter
from ..sentences.subject import Sentences, at_call_sites, parameter, place, quote, series, short, subject
from ..sentences.symbols import say_symbol

__all__ = [
    "LIMITS",
    "Limit",
    "consequence",
    "headline",
    "headline_of_fault",
    "next_step",
    "next_step_of_fault",
    "place",
]


class Limit(NamedTuple):
    """Something that reading sources cannot tell, and the tier that can."""

    what: str
    why: str
    seen_by: str


LIMITS = (
    Limit(
        "numerics",
        "The same signature can compute other numbers: another scale, order of sums or rounding.",
        "the dynamic tier: parity with native PyTorch on the target",
    ),
    Limit(
        "compiled code",
        "C++ and CUDA kernels and the symbols of the torch extension are not in the Python sources.",
        "the firewall tier for what cannot be loaded, the dynamic tier for what runs",
    ),
    Limit(
        "libraries below",
        "What a release needs of cuBLAS, cuDNN, NCCL and the driver is asked for at run time.",
        "the firewall tier for what is missing, the dynamic tier for what is too old",
    ),
    Limit(
        "performance",
        "A slower kernel has the same name.",
        "the dynamic tier: benchmarks side by side on the target",
    ),
    Limit(
        "silent choice of a backend",
        "Which attention, GEMM or permute backend runs depends on the device, versions and shapes.",
        "the dynamic tier: its receipts hold the backend that was observed",
    ),
    Limit(
        "behaviour behind the same signature",
        "New checks, warnings and defaults in a body are looked for; any other change in a body is not seen.",
        "the dynamic tier: one probe a bridge module",
    ),
    Limit(
        "names made at run time",
        "What setattr or a registry makes is not in the sources: `weight0`, `weight1`, for one.",
        "the dynamic tier: one probe a bridge module",
    ),
)


def headline(finding: Finding) -> str:
    """What changed, in one line."""
    return _say(finding, "").headline


def consequence(finding: Finding) -> str:
    """What the change does to the bridge as it is written."""
    say = _say(finding, "")
    if _is_followed(finding):
        return f"The bridge takes {_other_way(finding)} by itself wherever it is there."
    match finding.impact:
        case Impact.BREAKING:
            return say.breaking
        case Impact.RISK:
            return say.risk
        case Impact.HARMLESS:
            return say.harmless
        case _:
            assert_never(finding.impact)


def next_step(finding: Finding, old: str = "") -> str:
    """What to do about it, concretely.

    Args:
        finding: the change.
        old: version that the step starts from, where it is known; the advice to stay on it names it.
    """
    if _is_followed(finding):
        where = series(old)
        return (
            f"nothing to do: the bridge already takes {_other_way(finding)}; "
            f"drop the path that only {where} needs when {where} leaves the matrix"
        )
    if finding.impact is Impact.HARMLESS:
        return "nothing to do"
    return _say(finding, old).next_step


def headline_of_fault(finding: Finding) -> str:
    """What is wrong, in one line, about a use that fails in both releases: nothing changed there."""
    if finding.kind is ChangeKind.PARAMETER_REMOVED:
        return f"{subject(finding)} does not take {parameter(finding)}"
    if finding.kind is ChangeKind.PARAMETER_REQUIRED:
        return f"{subject(finding)} requires {parameter(finding)}"
    return headline(finding)


def next_step_of_fault(finding: Finding, old: str = "") -> str:
    """What to do about a use that fails in the old release already: staying there is no help."""
    where = at_call_sites(finding)
    return f"{where}call it in a second way for releases like {series(old)}, or leave them out of the matrix"


def _say(finding: Finding, old: str) -> Sentences:
    match finding.kind:
        case (
            ChangeKind.REMOVED
            | ChangeKind.MOVED
            | ChangeKind.RENAMED
            | ChangeKind.CLASS_BECAME_FUNCTION
            | ChangeKind.FUNCTION_BECAME_CLASS
            | ChangeKind.NOT_CALLABLE
            | ChangeKind.ATTRIBUTE_REMOVED
            | ChangeKind.DECORATOR_LOST
            | ChangeKind.CONTEXT_MANAGER_LOST
        ) as kind:
            return say_symbol(kind, finding, old)
        case (
            ChangeKind.PARAMETER_REMOVED
            | ChangeKind.PARAMETER_RENAMED
            | ChangeKind.PARAMETER_REORDERED
            | ChangeKind.PARAMETER_REQUIRED
            | ChangeKind.PARAMETER_KEYWORD_ONLY
            | ChangeKind.PARAMETER_POSITIONAL_ONLY
        ) as kind:
            return say_parameter(kind, finding, old)
        case (
            ChangeKind.DEFAULT_CHANGED
            | ChangeKind.DEFAULT_MEANING_CHANGED
            | ChangeKind.RETURN_CHANGED
            | ChangeKind.DEPRECATED
            | ChangeKind.GUARD_ADDED
            | ChangeKind.WARNING_ADDED
            | ChangeKind.IMPORT_REQUIREMENT_ADDED
        ) as kind:
            return say_behaviour(kind, finding, old)
        case _:
            assert_never(finding.kind)


def _is_followed(finding: Finding) -> bool:
    # A breaking finding is never waved through: if the second path worked, it would not break.
    return finding.follows and finding.impact is not Impact.BREAKING


def _other_way(finding: Finding) -> str:
    # What moved keeps its name; only the place says which of the two is meant.
    if short(finding.suggestion) == short(finding.symbol):
        return quote(finding.suggestion)
    return quote(short(finding.suggestion), "the new way")
