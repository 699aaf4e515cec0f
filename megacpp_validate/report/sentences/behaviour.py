"""Sentences about what a call does: defaults, results, checks, warnings, and what importing needs."""

from __future__ import annotations

from typing import Literal, assert_never

from ...canary.static.findings import ChangeKind, Finding, Impact
from .subject import Sentences, at_call_sites, parameter, place, quote, series, stay, subject, successor

BehaviourKind = Literal[
    ChangeKind.DEFAULT_CHANGED,
    ChangeKind.DEFAULT_MEANING_CHANGED,
    ChangeKind.RETURN_CHANGED,
    ChangeKind.DEPRECATED,
    ChangeKind.GUARD_ADDED,
    ChangeKind.WARNING_ADDED,
    ChangeKind.IMPORT_REQUIREMENT_ADDED,
]


def say_behaviour(kind: BehaviourKind, finding: Finding, old: str) -> Sentences:
    """The sentences for a change to what a call does; `old` is the release to stay on."""
    match kind:
        case ChangeKind.DEFAULT_CHANGED:
            say = _default_changed
        case ChangeKind.DEFAULT_MEANING_CHANGED:
            say = _default_meaning_changed
        case ChangeKind.RETURN_CHANGED:
            say = _return_changed
        case ChangeKind.DEPRECATED:
            say = _deprecated
        case ChangeKind.GUARD_ADDED:
            say = _guard_added
        case ChangeKind.WARNING_ADDED:
            say = _warning_added
        case ChangeKind.IMPORT_REQUIREMENT_ADDED:
            say = _import_requirement_added
        case _:
            assert_never(kind)
    return say(finding, old)


def _default_changed(finding: Finding, old: str) -> Sentences:
    what = parameter(finding)
    was, now = quote(finding.old, "nothing"), quote(finding.new, "nothing")
    return Sentences(
        f"{subject(finding)}: the default of {what} went from {was} to {now}",
        f"The call leans on the default of {what}, and with {now} it does not do what the bridge asks for.",
        f"The call leans on the default of {what}, so it now runs with {now} and no line of it was edited.",
        f"The bridge passes its own {what}, or does not lean on it.",
        f"{at_call_sites(finding)}pass {what} explicitly: {was} keeps what {series(old)} did, {now} accepts the change",
    )


def _default_meaning_changed(finding: Finding, old: str) -> Sentences:
    what = parameter(finding)
    return Sentences(
        f"{subject(finding)}: leaving out {what} means something else now{_became(finding)}",
        f"The call leaves out {what}, and the new meaning does not do what the bridge asks for.",
        f"The call leaves out {what}: the signature is the same, the behaviour is not.",
        f"The bridge passes its own {what}, or does not lean on it.",
        f"{at_call_sites(finding)}pass {what} explicitly, with what {series(old)} took it for",
    )


def _return_changed(finding: Finding, old: str) -> Sentences:
    name = subject(finding)
    return Sentences(
        f"{name} returns something else{_became(finding)}",
        "The call site takes the result apart as before, so it fails or takes one value for another.",
        "The call site uses the result as before; whether it still may shows at run time.",
        "The bridge does not use what changed in the result.",
        f"{at_call_sites(finding)}take apart what {name} returns now, "
        f"and keep the old way while {series(old)} is in the matrix",
    )


def _deprecated(finding: Finding, old: str) -> Sentences:
    name, new = subject(finding), successor(finding)
    what = f"{parameter(finding)} of {name}" if finding.parameter else name
    use = f"pass {new}, not {parameter(finding)}" if finding.parameter else f"take {new} where it is there"
    go = (
        f"{use}, and the old way only while {series(old)} is in the matrix"
        if new
        else f"plan to do without {what}: a later release will drop it"
    )
    notice = f": {quote(finding.new)}" if finding.new else ""
    return Sentences(
        f"{what} is deprecated" + (f" in favour of {new}" if new else notice),
        "The deprecated way no longer does what the bridge asks for.",
        "It works and warns; a later release will drop it.",
        "The bridge does not use the deprecated way.",
        at_call_sites(finding) + go,
    )


def _guard_added(finding: Finding, old: str) -> Sentences:
    on = f" of {parameter(finding)}" if finding.parameter else ""
    says = _it_says(finding)
    return Sentences(
        f"{subject(finding)} has a new check{on}" + (f": {quote(finding.new)}" if finding.new else ""),
        f"What the call passes does not get past the check, so it raises.{says}",
        f"The call runs into the check; whether it gets past depends on values and the device.{says}",
        f"What the bridge passes does not reach the check.{says}",
        f"{at_call_sites(finding)}satisfy the check before the call, or take the native path there; "
        f"{stay(old)} until that is done",
    )


def _warning_added(finding: Finding, old: str) -> Sentences:
    on = f" about {parameter(finding)}" if finding.parameter else ""
    says = _it_says(finding)
    return Sentences(
        f"{subject(finding)} has a new warning{on}" + (f": {quote(finding.new)}" if finding.new else ""),
        f"The call runs into the warning, and what it asks for is no longer done.{says}",
        f"The call runs into the warning: a removal to come, or another path taken.{says}",
        f"What the bridge passes does not reach the warning.{says}",
        f"{at_call_sites(finding)}read the warning and change the call before it becomes an error; "
        f"{series(old)} does not warn",
    )


def _import_requirement_added(finding: Finding, old: str) -> Sentences:
    module = quote(finding.symbol, "Transformer Engine")
    if not finding.parameter:
        return _import_check_added(finding, module, old)
    need = parameter(finding)
    when = finding.suggestion.removeprefix("only if ")
    only = f" It is asked for only if: {quote(when)}." if when else ""
    return Sentences(
        f"importing {module} now imports {need}",
        f"Where {need} is missing, the import fails and every bridge module takes its native path.{only}",
        f"Where {need} is missing, the import may fail; what is installed cannot be seen from here.{only}",
        f"The bridge does not import {module}.",
        f"see that {need} is in the environment before the upgrade, or {stay(old)}",
    )


def _import_check_added(finding: Finding, module: str, old: str) -> Sentences:
    if finding.impact is Impact.BREAKING:  # it ends by itself, whatever is installed
        return Sentences(
            f"importing {module} fails: {quote(finding.new)}",
            "Nothing in the environment mends it: every bridge module takes its native path.",
            "The import may fail.",
            f"The bridge does not import {module}.",
            stay(old),
        )
    where = f"{place(finding.after)}: " if finding.after else ""
    return Sentences(
        f"importing {module} has a new check" + (f": {quote(finding.new)}" if finding.new else ""),
        "Where the check does not pass, the import fails and every bridge module takes its native path.",
        "Where the check does not pass, the import fails; what is installed cannot be seen from here.",
        f"The bridge does not import {module}.",
        f"{where}see that the environment passes the check before the upgrade, or {stay(old)}",
    )


def _it_says(finding: Finding) -> str:
    # The canary keeps the message of a check or a warning where other kinds have the likely new name.
    return f" It says: {quote(finding.suggestion)}." if finding.suggestion else ""


def _became(finding: Finding) -> str:
    if not finding.old and not finding.new:
        return ""
    return f": {quote(finding.old, 'nothing')} became {quote(finding.new, 'nothing')}"
