"""The words about a change of an API: what changed, and what to do.

`KINDS` is one table: a row a kind of change. A next step with ` | ` has another form where no successor is known.
"""

from __future__ import annotations

from typing import Final

from ...canary.static.findings import ChangeKind, Doubt, Finding, Impact

# fmt: off
KINDS: Final[dict[ChangeKind, tuple[str, str]]] = {
    ChangeKind.REFUSED: ("the module raises under this release, by a check of its own",
        "extend the check once the rest of the module works under this release, or {stay}"),
    ChangeKind.ADDED: ("{subject} is new; {series} does not have it",
        "nothing to do, unless {series} is in the matrix"),
    ChangeKind.REMOVED: ("{subject} is removed{likely}",
        "import {successor} where {subject} is missing, and check that both do the same"
        " | {stay} until there is a successor; look for {subject} in the release notes"),
    ChangeKind.MOVED: ("{subject} moved from {was} to {now}",
        "import {successor} from {place} first, and from the old place only while {series} is in the matrix"),
    ChangeKind.RENAMED: ("{subject} is now called {successor}",
        "use {successor} where it exists, and {subject} only while {series} is in the matrix"),
    ChangeKind.CLASS_BECAME_FUNCTION: ("{subject} was a class and is now a function",
        "use what {subject} returns, not {subject} as a type, or {stay}"),
    ChangeKind.NOT_CALLABLE: ("{subject} can no longer be called",
        "do not call {subject}; use {suggestion} | do not call {subject}; {stay} until the new way is known"),
    ChangeKind.ATTRIBUTE_REMOVED: ("{owner} no longer has {attribute}{likely}",
        "read {successor} instead of {attribute} | do without {attribute}, or {stay} until there is a successor"),
    ChangeKind.DECORATOR_LOST: ("{subject} can no longer be used as a decorator",
        "enter {subject} with `with` inside the function, or {stay}"),
    ChangeKind.CONTEXT_MANAGER_LOST: ("{subject} can no longer be entered with `with`",
        "enter {suggestion} instead | switch the scope on and off by hand, or {stay}"),
    ChangeKind.PARAMETER_REMOVED: ("{subject} no longer takes {parameter}",
        "do not pass {parameter}; {suggestion} is the likely replacement; {stay} if the effect is needed"
        " | do not pass {parameter}; {stay} if the effect is needed"),
    ChangeKind.PARAMETER_RENAMED: ("{subject} takes {new_name} where it took {parameter}",
        "rename {keyword} to {new_keyword} (keep both ways while {series} is in the matrix)"),
    ChangeKind.PARAMETER_REORDERED: ("{subject} takes its parameters in another order, {parameter} among them",
        "pass {parameter} by keyword if {series} takes that too, else call each release by its own signature"),
    ChangeKind.PARAMETER_REQUIRED: ("{subject} now requires {parameter}{was_default}",
        "pass {parameter}"),
    ChangeKind.PARAMETER_KEYWORD_ONLY: ("{subject} takes {parameter} by keyword only",
        "pass {keyword} by keyword; {series} takes that too"),
    ChangeKind.PARAMETER_POSITIONAL_ONLY: ("{subject} takes {parameter} by position only",
        "pass {parameter} by position, which works in {series} too"),
    ChangeKind.DEFAULT_CHANGED: ("{subject}: the default of {parameter} went from {old} to {new}",
        "pass {parameter} explicitly: {old} keeps the behaviour of {series}, {new} accepts the change"),
    ChangeKind.DEFAULT_MEANING_CHANGED: ("{subject}: leaving out {parameter} has another meaning: {old} became {new}",
        "pass {parameter} explicitly, with the value that {series} assumed"),
    ChangeKind.RETURN_CHANGED: ("{subject} returns another value: {old} became {new}",
        "unpack what {subject} returns now, and keep the old way while {series} is in the matrix"),
    ChangeKind.DEPRECATED: ("{of_subject} is deprecated{favour}",
        "use {successor} where it exists, and the old way only while {series} is in the matrix"
        " | plan to do without {of_subject}: a later release will drop it"),
    ChangeKind.GUARD_ADDED: ("{subject} has a new check{of_parameter}{detail}",
        "satisfy the check before the call, or {stay}"),
    ChangeKind.WARNING_ADDED: ("{subject} has a new warning{of_parameter}{detail}",
        "read the warning and change the call before it becomes an error; {series} does not warn"),
    ChangeKind.IMPORT_REQUIREMENT_ADDED: ("importing {module} now imports {parameter}{when}",
        "see that {parameter} can be imported, or {stay}"),
    ChangeKind.NOT_LOADED: ("importing {was} no longer loads its submodule {subject}",
        "write `import {path}` in this file before the first use, which works in {series} too"),
}
_IMPORT_DEPRECATED: Final = (
    "importing {subject} from {was} is deprecated{detail}",
    "import {subject} from {place} where it exists, and from {was} only while {series} is in the matrix"
    " | plan to do without {subject}: a later release will drop {was}",
)
_IMPORT_CHECK: Final = (
    "importing {module} has a new check{detail}", "see that the environment passes the check{at}, or {stay}",
)
_IMPORT_FAILS: Final = ("importing {module} fails{detail}", "{stay}")
# What the old release does not have either has not changed.
_NEVER: Final = {
    ChangeKind.REMOVED: "{subject} does not exist",
    ChangeKind.PARAMETER_REMOVED: "{subject} does not take {parameter}",
    ChangeKind.PARAMETER_REQUIRED: "{subject} requires {parameter}",
}
_DOUBTS: Final = {
    Doubt.CAUGHT: "the code goes on without it",
    Doubt.GUARDED: "behind a check of the release that static analysis cannot evaluate",
}
# fmt: on


def headline(finding: Finding, old: str = "") -> str:
    """What changed since the release `old`, in one line, and why a use that fails as written is a risk only."""
    doubt = f" ({_DOUBTS[finding.doubt]})" if finding.doubt else ""
    return _words(finding)[0].format_map(_values(finding, old)) + doubt


def next_step(finding: Finding, old: str = "") -> str:
    """What to do about it; `old` is the release to stay on, where it is known."""
    if is_followed(finding) and finding.kind is not ChangeKind.ADDED:
        return (
            f"nothing to do: the code already uses {_other_way(finding)}; drop the path that only {_series(old)} "
            f"needs when {_series(old)} leaves the matrix"
        )
    if finding.impact is Impact.HARMLESS and finding.kind is not ChangeKind.ADDED:
        return "nothing to do"
    step, _, without = _words(finding)[1].partition(" | ")
    return (step if finding.suggestion or not without else without).format_map(_values(finding, old))


def next_step_of_fault(old: str = "") -> str:
    """What to do about a use that fails in the old release already: staying there is no help."""
    return f"call it in a second way for releases like {_series(old)}, or leave them out of the matrix"


def _words(finding: Finding) -> tuple[str, str]:
    if finding.kind is ChangeKind.IMPORT_REQUIREMENT_ADDED and not finding.parameter:
        return _IMPORT_FAILS if finding.impact is Impact.BREAKING else _IMPORT_CHECK
    if finding.kind is ChangeKind.DEPRECATED and finding.old == finding.symbol:
        return _IMPORT_DEPRECATED
    changed, step = KINDS[finding.kind]
    is_new = finding.before is None and finding.old in ("", finding.symbol)
    return _NEVER.get(finding.kind, changed) if is_new else changed, step


def _values(finding: Finding, old: str = "") -> dict[str, str]:
    """What a template can name."""
    subject, last = quote_subject(finding), "." + _short(finding.symbol)
    parameter, attribute = _quote(finding.parameter), _quote(finding.parameter or finding.member)
    successor = _quote(_short(finding.suggestion or finding.new))
    default = _quote(finding.old.removeprefix(f"{finding.parameter}="))
    after, renamed = finding.after, finding.suggestion or finding.new
    return {
        "subject": subject,
        "owner": _quote(_short(finding.symbol)) or "a symbol",
        "attribute": attribute or "an attribute that the code reads",
        "module": _quote(finding.symbol) or "the library",
        "path": finding.symbol,
        "parameter": parameter or "a parameter",
        "of_parameter": f" of {parameter}" if parameter else "",
        "of_subject": f"{parameter} of {subject}" if parameter else subject,
        "keyword": _keyword(finding.parameter),
        "new_keyword": _keyword(renamed),
        "suggestion": _quote(finding.suggestion),
        "successor": successor or "the new name",
        "likely": f"; {successor} is the likely successor" if finding.suggestion else "",
        "favour": f" in favour of {successor}" if finding.suggestion else _detail(finding),
        "detail": _detail(finding),
        "old": _quote(finding.old) or "nothing",
        "new": _quote(finding.new) or "nothing",
        "new_name": _quote(renamed) or "another name",
        "was_default": f" (the default was {default})" if default else "",
        "was": _quote((finding.old or finding.symbol).removesuffix(last)),
        "place": _quote(finding.suggestion.rpartition(".")[0]) or "the new place",
        "now": _quote((finding.new or finding.suggestion).removesuffix(last)) or "another place",
        "when": f" (only if {_quote(finding.suggestion.removeprefix('only if '))})" if finding.suggestion else "",
        "at": f" at {after.file}:{after.line}" if after else "",
        "series": _series(old),
        "stay": f"stay on {_series(old)}.x" if old[:1].isdigit() else "stay on the old release",
    }


def _detail(finding: Finding) -> str:
    return f": {_quote(finding.new)}" if finding.new else ""


def _quote(text: str) -> str:
    """A piece of source on one line between backticks; empty where there is none."""
    line = " ".join(text.replace("`", "'").split())
    return f"`{line}`" if line else ""


def quote_subject(finding: Finding) -> str:
    """The symbol as the code calls it, with the member in question."""
    name = _short(finding.symbol)
    return _quote(f"{name}.{finding.member}" if finding.member else name) or "a symbol"


def _keyword(name: str) -> str:
    """A name as it stands in a call, `recipe=`."""
    return f"`{name}=`" if name.isidentifier() else _quote(name) or "the keyword"


def _short(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def _series(version: str) -> str:
    """The release line of a version, "2.8" of "2.8.0"; words for a folder whose version is not known."""
    return ".".join(version.split(".")[:2]) if version[:1].isdigit() else "the old release"


def is_followed(finding: Finding) -> bool:
    """Whether the code already takes the new way by itself; what breaks never counts as followed."""
    return finding.follows and finding.impact is not Impact.BREAKING


def _other_way(finding: Finding) -> str:
    # What moved keeps its name; only the place says which of the two is meant.
    same = _short(finding.suggestion) == _short(finding.symbol)
    return _quote(finding.suggestion if same else _short(finding.suggestion)) or "the new way"
