"""Sentences about a symbol as a whole: gone, elsewhere, under another name, or another sort of thing."""

from __future__ import annotations

from typing import Literal, assert_never

from ...canary.static.findings import ChangeKind, Finding
from .subject import Sentences, at_call_sites, quote, series, short, stay, subject, successor

SymbolKind = Literal[
    ChangeKind.REMOVED,
    ChangeKind.MOVED,
    ChangeKind.RENAMED,
    ChangeKind.CLASS_BECAME_FUNCTION,
    ChangeKind.FUNCTION_BECAME_CLASS,
    ChangeKind.NOT_CALLABLE,
    ChangeKind.ATTRIBUTE_REMOVED,
    ChangeKind.DECORATOR_LOST,
    ChangeKind.CONTEXT_MANAGER_LOST,
]

_IMPORT_FAILS = (
    "The import fails, so the accessor gives None: what requires it stops with VendorEntryMissing, "
    "and what can do without it takes the native path."
)
_OTHER_PATH = "The bridge does without it where it is missing: another path is taken without a word."


def say_symbol(kind: SymbolKind, finding: Finding, old: str) -> Sentences:
    """The sentences for a change to a symbol; `old` is the release to stay on."""
    match kind:
        case ChangeKind.REMOVED:
            say = _removed
        case ChangeKind.MOVED:
            say = _moved
        case ChangeKind.RENAMED:
            say = _renamed
        case ChangeKind.CLASS_BECAME_FUNCTION:
            say = _class_became_function
        case ChangeKind.FUNCTION_BECAME_CLASS:
            say = _function_became_class
        case ChangeKind.NOT_CALLABLE:
            say = _not_callable
        case ChangeKind.ATTRIBUTE_REMOVED:
            say = _attribute_removed
        case ChangeKind.DECORATOR_LOST:
            say = _decorator_lost
        case ChangeKind.CONTEXT_MANAGER_LOST:
            say = _context_manager_lost
        case _:
            assert_never(kind)
    return say(finding, old)


def _removed(finding: Finding, old: str) -> Sentences:
    name, new = subject(finding), successor(finding)
    go = (
        f"import {new} where {name} is missing, and check that it does the same"
        if new
        else f"{stay(old)} until there is a successor; look for {name} in the release notes"
    )
    return Sentences(
        f"{name} is gone" + (f"; {new} looks like its successor" if new else ""),
        _IMPORT_FAILS,
        _OTHER_PATH,
        "No call of the bridge needs it.",
        at_call_sites(finding) + go,
    )


def _moved(finding: Finding, old: str) -> Sentences:
    name = subject(finding)
    last = "." + short(finding.symbol)
    was = (finding.old or finding.symbol).removesuffix(last)
    now = (finding.new or finding.suggestion).removesuffix(last)
    return Sentences(
        f"{name} moved from {quote(was)} to {quote(now, 'another place')}",
        _IMPORT_FAILS,
        "The old place still answers, through a forwarding name that a later release may drop.",
        "The place that the bridge imports it from still has it.",
        f"{at_call_sites(finding)}import {name} from {quote(now, 'its new place')} first, "
        f"and from the old place only while {series(old)} is in the matrix",
    )


def _renamed(finding: Finding, old: str) -> Sentences:
    name = subject(finding)
    new = successor(finding) or quote(short(finding.new), "another name")
    return Sentences(
        f"{name} is now called {new}",
        _IMPORT_FAILS,
        "The old name still answers, and a later release may drop it.",
        "No call of the bridge uses the old name.",
        f"{at_call_sites(finding)}take {new} where it is there, and {name} only while {series(old)} is in the matrix",
    )


def _class_became_function(finding: Finding, old: str) -> Sentences:
    name = subject(finding)
    return Sentences(
        f"{name} was a class and is now a function",
        "What needs the class fails: isinstance, a subclass, a layer spec, methods of its instances.",
        "The call still works; what it returns may have neither the class's type nor its methods.",
        "The bridge only calls it, and what it returns is used in the same way.",
        f"{at_call_sites(finding)}use what {name} returns, not {name} as a type, or {stay(old)}",
    )


def _function_became_class(finding: Finding, old: str) -> Sentences:
    name = subject(finding)
    return Sentences(
        f"{name} was a function and is now a class",
        "The call as written makes an instance where it expects the result.",
        "The call makes an instance now; it stands in for the result only if it behaves like it.",
        "The bridge uses it in a way that works with both.",
        f"{at_call_sites(finding)}make one {name} and call it, or {stay(old)} until that is done",
    )


def _not_callable(finding: Finding, old: str) -> Sentences:
    name = subject(finding)
    go = f"use {quote(finding.suggestion)}" if finding.suggestion else f"{stay(old)} until the new way is known"
    return Sentences(
        f"{name} can no longer be called",
        "The call as written raises TypeError.",
        "Calling it depends on what it is bound to at run time.",
        "The bridge does not call it.",
        f"{at_call_sites(finding)}do not call {name}; {go}",
    )


def _attribute_removed(finding: Finding, old: str) -> Sentences:
    owner = quote(short(finding.symbol), "a symbol")
    name = quote(finding.parameter or finding.member, "an attribute that the bridge reads")
    new = successor(finding)
    go = f"read {new} instead of {name}" if new else f"do without {name}, or {stay(old)} until there is a successor"
    return Sentences(
        f"{owner} no longer has {name}" + (f"; {new} looks like its successor" if new else ""),
        f"Reading {name} raises AttributeError.",
        f"{name} is no longer in the sources; an instance may still get it at run time.",
        "The bridge does not read it.",
        at_call_sites(finding) + go,
    )


def _decorator_lost(finding: Finding, old: str) -> Sentences:
    name = subject(finding)
    return Sentences(
        f"{name} can no longer be used as a decorator",
        f"The function under {name} is not wrapped as written: defining or calling it raises TypeError.",
        "It may still decorate, depending on what it returns at run time.",
        "The bridge does not use it as a decorator.",
        f"{at_call_sites(finding)}enter {name} with `with` inside the function, or {stay(old)}",
    )


def _context_manager_lost(finding: Finding, old: str) -> Sentences:
    name = subject(finding)
    return Sentences(
        f"{name} can no longer be entered with `with`",
        "The `with` statement raises TypeError, so the scope is never entered.",
        "It may still be entered, depending on what it returns at run time.",
        "The bridge does not enter it with `with`.",
        at_call_sites(finding)
        + (
            f"enter {quote(finding.suggestion)} instead"
            if finding.suggestion
            else f"switch the scope on and off by hand, or {stay(old)}"
        ),
    )
