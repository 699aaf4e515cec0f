"""The words about a change of an API: what changed, what that does to the code, what to do.

`KINDS` is one table: a row a kind of change. In a template, `[...|...]` is the first alternative whose placeholders are
all known, and nothing where none is.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from ...canary.static.findings import ChangeKind, Finding, Impact
from ...evidence.values import Cause


class Words(NamedTuple):
    """Templates about one kind of change; `breaking` is its consequence."""

    headline: str
    breaking: str
    next_step: str


_SITE_FAILS: Final = (
    "The import fails and the accessor returns None: code that requires {subject} raises VendorEntryMissing, other "
    "code takes the native path."
)
_PASSED: Final = "The call passes {parameter}[, which is silently ignored{ignored}|, so the call raises TypeError]."
_P: Final = "[{parameter}|a parameter]"
_BECAME: Final = "[: {old} became {new}|: {old} became nothing|: nothing became {new}]"
_WHILE: Final = "while {series} is in the matrix"

# fmt: off
KINDS: Final[dict[ChangeKind, Words]] = {
    ChangeKind.REMOVED: Words(
        "{subject} is removed[; {successor} is the likely successor]",
        _SITE_FAILS,
        "[import {successor} where {subject} is missing, and check that both do the same"
        "|{stay} until there is a successor; look for {subject} in the release notes]"),
    ChangeKind.MOVED: Words(
        "{subject} moved from {was} to [{now}|another place]",
        _SITE_FAILS,
        "import {subject} from [{now}|its new place] first, and from the old place only " + _WHILE),
    ChangeKind.RENAMED: Words(
        "{subject} is now called [{successor}|{new_name}|another name]",
        _SITE_FAILS,
        "use [{successor}|{new_name}|the new name] where it exists, and {subject} only " + _WHILE),
    ChangeKind.CLASS_BECAME_FUNCTION: Words(
        "{subject} was a class and is now a function",
        "Code that needs the class fails: isinstance, a subclass, a layer spec, methods of an instance.",
        "use what {subject} returns, not {subject} as a type, or {stay}"),
    ChangeKind.FUNCTION_BECAME_CLASS: Words(
        "{subject} was a function and is now a class",
        "The call creates an instance where the code expects the result.",
        "create one {subject} and call it, or {stay} until that is done"),
    ChangeKind.NOT_CALLABLE: Words(
        "{subject} can no longer be called",
        "The call raises TypeError.",
        "do not call {subject}; [use {suggestion}|{stay} until the new way is known]"),
    ChangeKind.ATTRIBUTE_REMOVED: Words(
        "{owner} no longer has {attribute}[; {successor} is the likely successor]",
        "Reading {attribute} raises AttributeError.",
        "[read {successor} instead of {attribute}|do without {attribute}, or {stay} until there is a successor]"),
    ChangeKind.DECORATOR_LOST: Words(
        "{subject} can no longer be used as a decorator",
        "Defining or calling the function under {subject} raises TypeError.",
        "enter {subject} with `with` inside the function, or {stay}"),
    ChangeKind.CONTEXT_MANAGER_LOST: Words(
        "{subject} can no longer be entered with `with`",
        "The `with` statement raises TypeError, so the scope is never entered.",
        "[enter {suggestion} instead|switch the scope on and off by hand, or {stay}]"),
    ChangeKind.PARAMETER_REMOVED: Words(
        "{subject} no longer takes " + _P,
        _PASSED,
        "do not pass " + _P + "[; {suggestion} is the likely replacement]; {stay} if the effect is needed"),
    ChangeKind.PARAMETER_RENAMED: Words(
        "{subject} takes [{suggestion}|{new}|another name] where it took " + _P,
        _PASSED,
        "rename {keyword} to {new_keyword} (keep both ways " + _WHILE + ")"),
    ChangeKind.PARAMETER_REORDERED: Words(
        "{subject} takes its parameters in another order[, {parameter} among them]",
        "Values that the call passes by position reach other parameters: TypeError, or wrong numbers.",
        "pass [{parameter}|them] by keyword, which works in {series} too"),
    ChangeKind.PARAMETER_REQUIRED: Words(
        "{subject} now requires " + _P + "[ (the default was {default})]",
        "The call does not pass " + _P + ", so the call raises TypeError.",
        "pass " + _P + "[; {default} is the default of {series}]"),
    ChangeKind.PARAMETER_KEYWORD_ONLY: Words(
        "{subject} takes " + _P + " by keyword only",
        "The call passes " + _P + " by position, so the call raises TypeError.",
        "pass {keyword} by keyword; {series} takes that too"),
    ChangeKind.PARAMETER_POSITIONAL_ONLY: Words(
        "{subject} takes " + _P + " by position only",
        _PASSED,
        "pass " + _P + " by position, which works in {series} too"),
    ChangeKind.DEFAULT_CHANGED: Words(
        "{subject}: the default of " + _P + " went from [{old}|nothing] to [{new}|nothing]",
        "The call relies on the default of " + _P + ", and [{new}|nothing] does not do what the code needs.",
        "pass " + _P + " explicitly: [{old}|nothing] keeps the behaviour of {series}, [{new}|nothing] accepts the "
        "change"),
    ChangeKind.DEFAULT_MEANING_CHANGED: Words(
        "{subject}: leaving out " + _P + " has another meaning" + _BECAME,
        "The call leaves out " + _P + ", and the new meaning does not do what the code needs.",
        "pass " + _P + " explicitly, with the value that {series} assumed"),
    ChangeKind.RETURN_CHANGED: Words(
        "{subject} returns another value" + _BECAME,
        "The call site unpacks the result as before, so it fails or takes one value for another.",
        "unpack what {subject} returns now, and keep the old way " + _WHILE),
    ChangeKind.DEPRECATED: Words(
        "[{parameter} of ]{subject} is deprecated[ in favour of {successor}|: {new}]",
        "The deprecated way no longer does what the code needs.",
        "[pass {successor}, not {parameter}, and the old way only " + _WHILE
        + "|{no_parameter}use {successor} where it exists, and the old way only " + _WHILE
        + "|plan to do without {parameter} of {subject}: a later release will drop it"
        + "|plan to do without {subject}: a later release will drop it]"),
    ChangeKind.GUARD_ADDED: Words(
        "{subject} has a new check[ of {parameter}][: {new}]",
        "The values that the call passes fail the check, so the call raises.[ Message: {suggestion}.]",
        "satisfy the check before the call, or {stay}"),
    ChangeKind.WARNING_ADDED: Words(
        "{subject} has a new warning[ about {parameter}][: {new}]",
        "The call triggers the warning, and its request is no longer honoured.[ Message: {suggestion}.]",
        "read the warning and change the call before it becomes an error; {series} does not warn"),
    ChangeKind.IMPORT_REQUIREMENT_ADDED: Words(
        "importing {module} now imports {parameter}[ (only if {when})]",
        "Where {parameter} is missing, the import fails and code that catches the failure takes its other path.",
        "see that {parameter} can be imported, or {stay}"),
}
_IMPORT_CHECK: Final = Words(
    "importing {module} has a new check[: {new}]",
    "Where the check does not pass, the import fails and code that catches the failure takes its other path.",
    "see that the environment passes the check[ at {after}], or {stay}")
_IMPORT_ENDS: Final = Words(
    "importing {module} fails[: {new}]",
    "Nothing in the environment repairs the import: code that catches the failure takes its other path.",
    "{stay}")
_FAULTS: Final = {  # what is wrong with a use that fails in both releases: nothing changed there
    ChangeKind.PARAMETER_REMOVED: "{subject} does not take " + _P,
    ChangeKind.PARAMETER_REQUIRED: "{subject} requires " + _P,
}
_CHECKS: Final = (ChangeKind.GUARD_ADDED, ChangeKind.WARNING_ADDED)  # their suggestion is what they say
_EFFECTS: Final = {
    Impact.RISK: "This use may fail or act otherwise; the result depends on runtime values.[ Message: {message}.]",
    Impact.HARMLESS: "The code uses nothing that the change touches.",
}
# fmt: on


def headline(finding: Finding) -> str:
    """What changed, in one line."""
    return _fill(_words(finding).headline, finding)


def consequence(finding: Finding) -> str:
    """What the change does to the code as it is written."""
    if is_followed(finding):
        return f"The code already uses {_other_way(finding)} where it exists."
    return _fill(_words(finding).breaking if finding.impact is Impact.BREAKING else _EFFECTS[finding.impact], finding)


def next_step(finding: Finding, old: str = "") -> str:
    """What to do about it; `old` is the release to stay on, where it is known."""
    if is_followed(finding):
        return (
            f"nothing to do: the code already uses {_other_way(finding)}; drop the path that only {_series(old)} "
            f"needs when {_series(old)} leaves the matrix"
        )
    return "nothing to do" if finding.impact is Impact.HARMLESS else _fill(_words(finding).next_step, finding, old)


def headline_of_fault(finding: Finding) -> str:
    """What is wrong with a use that fails in both releases."""
    return _fill(_FAULTS.get(finding.kind, _words(finding).headline), finding)


def next_step_of_fault(old: str = "") -> str:
    """What to do about a use that fails in the old release already: staying there is no help."""
    return f"call it in a second way for releases like {_series(old)}, or leave them out of the matrix"


def _words(finding: Finding) -> Words:
    if finding.kind is ChangeKind.IMPORT_REQUIREMENT_ADDED and not finding.parameter:
        return _IMPORT_ENDS if finding.impact is Impact.BREAKING else _IMPORT_CHECK
    return KINDS[finding.kind]


def _fill(template: str, finding: Finding, old: str = "") -> str:
    values = _values(finding, old)

    def choose(found: re.Match[str]) -> str:
        options = found[1].split("|")
        return next((one for one in options if all(values[name] for name in re.findall(r"{(\w+)}", one))), "")

    return re.sub(r"\[([^\[\]]*)\]", choose, template).format_map({**values, "no_parameter": "", "ignored": ""})


def _values(finding: Finding, old: str) -> dict[str, str]:
    """What a template can name; empty where it is not known."""
    last = "." + _short(finding.symbol)
    renamed = finding.suggestion or finding.new
    attribute = finding.parameter or finding.member
    return {
        "subject": quote_subject(finding),
        "owner": _quote(_short(finding.symbol)) or "a symbol",
        "attribute": _quote(attribute) or "an attribute that the code reads",
        "module": _quote(finding.symbol) or "Transformer Engine",
        "parameter": _quote(finding.parameter),
        "no_parameter": "" if finding.parameter else "yes",
        # Recipes are dataclasses that take a field they do not know and drop it: no error says so.
        "ignored": "yes" if finding.cause is Cause.SILENT_FALLBACK else "",
        "keyword": _keyword(finding.parameter),
        "new_keyword": _keyword(renamed),
        "suggestion": _quote(finding.suggestion),
        "message": _quote(finding.suggestion) if finding.kind in _CHECKS else "",
        "successor": _quote(_short(finding.suggestion)),
        "old": _quote(finding.old),
        "new": _quote(finding.new),
        "new_name": _quote(_short(finding.new)),
        "default": _quote(finding.old.removeprefix(f"{finding.parameter}=")),
        "was": _quote((finding.old or finding.symbol).removesuffix(last)),
        "now": _quote((finding.new or finding.suggestion).removesuffix(last)),
        "when": _quote(finding.suggestion.removeprefix("only if ")),
        "after": f"{finding.after.file}:{finding.after.line}" if finding.after else "",
        "series": _series(old),
        "stay": f"stay on {_series(old)}.x" if old else "stay on the old release",
    }


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
    """The release line of a version, "2.8" of "2.8.0"."""
    return ".".join(version.split(".")[:2]) if version else "the old release"


def is_followed(finding: Finding) -> bool:
    """Whether the code already takes the new way by itself."""
    # A breaking finding is never waved through: if the second path worked, it would not break.
    return finding.follows and finding.impact is not Impact.BREAKING


def _other_way(finding: Finding) -> str:
    # What moved keeps its name; only the place says which of the two is meant.
    same = _short(finding.suggestion) == _short(finding.symbol)
    return _quote(finding.suggestion if same else _short(finding.suggestion)) or "the new way"
