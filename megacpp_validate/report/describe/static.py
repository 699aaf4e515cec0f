"""What the static tier found, as documents: one pair of releases, and every pair in a row.

The words about a change are one table, `KINDS`: a kind -> what changed, what that does to the bridge, what to do. In a
template, `[...|...]` is the first alternative whose placeholders are all known, and nothing where none is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from ...canary.static.findings import (
    ChangeKind,
    Finding,
    Impact,
    ModuleResult,
    ModuleVerdict,
    StaticResult,
    Sweep,
)
from ...evidence.values import Cause, SourceLine
from ...text import count
from ..document import (
    Block,
    Bullets,
    Details,
    Diagnostic,
    Document,
    Heading,
    Inline,
    Mark,
    Paragraph,
    Place,
    Table,
    Tone,
    bad,
    cascade,
    good,
    missing,
    quiet,
    risk,
)

VERDICTS: Final = {
    ModuleVerdict.BREAKS: bad("breaks"),
    ModuleVerdict.CASCADE: cascade("breaks with its cause"),
    ModuleVerdict.RISK: risk("at risk"),
    ModuleVerdict.CLEAN: good("clean"),
}
IMPACTS: Final = {Impact.BREAKING: bad("breaking"), Impact.RISK: risk("risk"), Impact.HARMLESS: quiet("harmless")}
LIMITS: Final = (
    ("numerics", "The same signature can compute other numbers.", "`--tiers gpu`: parity with native PyTorch"),
    ("compiled code", "C++ and CUDA kernels are not in the Python sources.", "`import-firewall` and `--tiers gpu`"),
    ("libraries below", "Needs of cuBLAS, cuDNN, NCCL and the driver show at run time.", "`doctor` and `--tiers gpu`"),
    ("performance", "A slower kernel has the same name.", "`--tiers gpu`: timings side by side on the target"),
    ("choice of a backend", "The backend depends on device, versions and shapes.", "`--tiers gpu`: observed backends"),
    ("other changes in a function body", "New checks, warnings and defaults are reported, nothing else.",
     "`--tiers gpu`: one probe a bridge module"),
    ("names made at run time", "What `setattr` or a registry makes is not in the sources.",
     "`--tiers gpu`: one probe a bridge module"),
)  # fmt: skip
_LONGEST_QUOTE: Final = 120
_MOST_NAMED: Final = 6
_GRID: Final = "Each release beside the one before it; a number counts findings."


class Words(NamedTuple):
    """Templates about one kind of change; `breaking`, `risk` and `harmless` are its consequences."""

    headline: str
    breaking: str
    risk: str
    harmless: str
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
        "The bridge works without {subject}, but silently takes another path.",
        "No call of the bridge needs {subject}.",
        "[import {successor} where {subject} is missing, and check that both do the same"
        "|{stay} until there is a successor; look for {subject} in the release notes]"),
    ChangeKind.MOVED: Words(
        "{subject} moved from {was} to [{now}|another place]",
        _SITE_FAILS,
        "The old import path works through a forwarding name that a later release may drop.",
        "The import path that the bridge uses still works.",
        "import {subject} from [{now}|its new place] first, and from the old place only " + _WHILE),
    ChangeKind.RENAMED: Words(
        "{subject} is now called [{successor}|{new_name}|another name]",
        _SITE_FAILS,
        "The old name still works, and a later release may drop it.",
        "No call of the bridge uses the old name.",
        "use [{successor}|{new_name}|the new name] where it exists, and {subject} only " + _WHILE),
    ChangeKind.CLASS_BECAME_FUNCTION: Words(
        "{subject} was a class and is now a function",
        "Code that needs the class fails: isinstance, a subclass, a layer spec, methods of an instance.",
        "The call still works; the returned object may have neither the type nor the methods of the class.",
        "The bridge only calls {subject}, and uses the result in the same way.",
        "use what {subject} returns, not {subject} as a type, or {stay}"),
    ChangeKind.FUNCTION_BECAME_CLASS: Words(
        "{subject} was a function and is now a class",
        "The call creates an instance where the bridge expects the result.",
        "The call creates an instance; the instance must behave like the earlier result.",
        "The bridge uses {subject} in a way that works with both.",
        "create one {subject} and call it, or {stay} until that is done"),
    ChangeKind.NOT_CALLABLE: Words(
        "{subject} can no longer be called",
        "The call raises TypeError.",
        "Whether the call works depends on what {subject} is bound to at run time.",
        "The bridge does not call {subject}.",
        "do not call {subject}; [use {suggestion}|{stay} until the new way is known]"),
    ChangeKind.ATTRIBUTE_REMOVED: Words(
        "{owner} no longer has {attribute}[; {successor} is the likely successor]",
        "Reading {attribute} raises AttributeError.",
        "{attribute} is no longer in the sources; an instance may still get it at run time.",
        "The bridge does not read {attribute}.",
        "[read {successor} instead of {attribute}|do without {attribute}, or {stay} until there is a successor]"),
    ChangeKind.DECORATOR_LOST: Words(
        "{subject} can no longer be used as a decorator",
        "Defining or calling the function under {subject} raises TypeError.",
        "Whether {subject} still decorates depends on what it returns at run time.",
        "The bridge does not use {subject} as a decorator.",
        "enter {subject} with `with` inside the function, or {stay}"),
    ChangeKind.CONTEXT_MANAGER_LOST: Words(
        "{subject} can no longer be entered with `with`",
        "The `with` statement raises TypeError, so the scope is never entered.",
        "Whether {subject} can be entered depends on what it returns at run time.",
        "The bridge does not enter {subject} with `with`.",
        "[enter {suggestion} instead|switch the scope on and off by hand, or {stay}]"),
    ChangeKind.PARAMETER_REMOVED: Words(
        "{subject} no longer takes " + _P,
        _PASSED,
        "The call may pass " + _P + ", depending on how it is made; then it fails, or the value is ignored.",
        "The bridge does not pass " + _P + ".",
        "do not pass " + _P + "[; {suggestion} is the likely replacement]; {stay} if the effect is needed"),
    ChangeKind.PARAMETER_RENAMED: Words(
        "{subject} takes [{suggestion}|{new}|another name] where it took " + _P,
        _PASSED,
        "The old keyword still works, and a later release may drop it.",
        "The bridge passes the value by position, or not at all.",
        "rename {keyword} to {new_keyword} (keep both ways " + _WHILE + ")"),
    ChangeKind.PARAMETER_REORDERED: Words(
        "{subject} takes its parameters in another order[, {parameter} among them]",
        "Values that the call passes by position reach other parameters: TypeError, or wrong numbers.",
        "The call passes some parameters by position; those before the change still arrive where they should.",
        "The bridge passes the moved parameters by keyword.",
        "pass [{parameter}|them] by keyword, which works in {series} too"),
    ChangeKind.PARAMETER_REQUIRED: Words(
        "{subject} now requires " + _P + "[ (the default was {default})]",
        "The call does not pass " + _P + ", so the call raises TypeError.",
        "The call may leave out " + _P + ", depending on how it is made.",
        "The bridge already passes " + _P + ".",
        "pass " + _P + "[; {default} is the default of {series}]"),
    ChangeKind.PARAMETER_KEYWORD_ONLY: Words(
        "{subject} takes " + _P + " by keyword only",
        "The call passes " + _P + " by position, so the call raises TypeError.",
        "The call may pass " + _P + " by position, depending on how it is made.",
        "The bridge already passes " + _P + " by keyword, or not at all.",
        "pass {keyword} by keyword; {series} takes that too"),
    ChangeKind.PARAMETER_POSITIONAL_ONLY: Words(
        "{subject} takes " + _P + " by position only",
        _PASSED,
        "The call may pass " + _P + " by keyword, depending on how it is made.",
        "The bridge already passes " + _P + " by position, or not at all.",
        "pass " + _P + " by position, which works in {series} too"),
    ChangeKind.DEFAULT_CHANGED: Words(
        "{subject}: the default of " + _P + " went from [{old}|nothing] to [{new}|nothing]",
        "The call relies on the default of " + _P + ", and [{new}|nothing] does not do what the bridge needs.",
        "The call relies on the default of " + _P + ", so it now runs with [{new}|nothing].",
        "The bridge passes its own " + _P + ", or does not rely on the default.",
        "pass " + _P + " explicitly: [{old}|nothing] keeps the behaviour of {series}, [{new}|nothing] accepts the "
        "change"),
    ChangeKind.DEFAULT_MEANING_CHANGED: Words(
        "{subject}: leaving out " + _P + " has another meaning" + _BECAME,
        "The call leaves out " + _P + ", and the new meaning does not do what the bridge needs.",
        "The call leaves out " + _P + ": the signature is the same, the behaviour is not.",
        "The bridge passes its own " + _P + ", or does not rely on the default.",
        "pass " + _P + " explicitly, with the value that {series} assumed"),
    ChangeKind.RETURN_CHANGED: Words(
        "{subject} returns another value" + _BECAME,
        "The call site unpacks the result as before, so it fails or takes one value for another.",
        "The call site uses the result as before; whether that works shows at run time.",
        "The bridge does not use what changed in the result.",
        "unpack what {subject} returns now, and keep the old way " + _WHILE),
    ChangeKind.DEPRECATED: Words(
        "[{parameter} of ]{subject} is deprecated[ in favour of {successor}|: {new}]",
        "The deprecated way no longer does what the bridge needs.",
        "The call works and warns; a later release will drop the deprecated way.",
        "The bridge does not use the deprecated way.",
        "[pass {successor}, not {parameter}, and the old way only " + _WHILE
        + "|{no_parameter}use {successor} where it exists, and the old way only " + _WHILE
        + "|plan to do without {parameter} of {subject}: a later release will drop it"
        + "|plan to do without {subject}: a later release will drop it]"),
    ChangeKind.GUARD_ADDED: Words(
        "{subject} has a new check[ of {parameter}][: {new}]",
        "The values that the call passes fail the check, so the call raises.[ Message: {suggestion}.]",
        "This call reaches a new check; the result depends on runtime values.[ Message: {suggestion}.]",
        "The values that the bridge passes do not reach the check.[ Message: {suggestion}.]",
        "satisfy the check before the call, or {stay}"),
    ChangeKind.WARNING_ADDED: Words(
        "{subject} has a new warning[ about {parameter}][: {new}]",
        "The call triggers the warning, and its request is no longer honoured.[ Message: {suggestion}.]",
        "The call triggers the warning: a removal to come, or another path.[ Message: {suggestion}.]",
        "The values that the bridge passes do not reach the warning.[ Message: {suggestion}.]",
        "read the warning and change the call before it becomes an error; {series} does not warn"),
    ChangeKind.IMPORT_REQUIREMENT_ADDED: Words(
        "importing {module} now imports {parameter}[ (only if {when})]",
        "Where {parameter} is missing, the import fails and every bridge module takes its native path.",
        "Where {parameter} is missing, the import may fail; the static tier does not know what is installed.",
        "The bridge does not import {module}.",
        "see that {parameter} can be imported, or {stay}"),
}
_IMPORT_CHECK: Final = Words(
    "importing {module} has a new check[: {new}]",
    "Where the check does not pass, the import fails and every bridge module takes its native path.",
    "Where the check does not pass, the import fails; the static tier does not know what is installed.",
    "The bridge does not import {module}.",
    "see that the environment passes the check[ at {after}], or {stay}")
_IMPORT_ENDS: Final = Words(
    "importing {module} fails[: {new}]",
    "Nothing in the environment repairs the import: every bridge module takes its native path.",
    "The import may fail.", "The bridge does not import {module}.", "{stay}")
_FAULTS: Final = {  # what is wrong with a use that fails in both releases: nothing changed there
    ChangeKind.PARAMETER_REMOVED: "{subject} does not take " + _P,
    ChangeKind.PARAMETER_REQUIRED: "{subject} requires " + _P,
}
# fmt: on


def headline(finding: Finding) -> str:
    """What changed, in one line."""
    return _fill(_words(finding).headline, finding)


def consequence(finding: Finding) -> str:
    """What the change does to the bridge as it is written."""
    if _is_followed(finding):
        return f"The bridge already uses {_other_way(finding)} where it exists."
    return _fill(getattr(_words(finding), finding.impact.value), finding)


def next_step(finding: Finding, old: str = "") -> str:
    """What to do about it; `old` is the release to stay on, where it is known."""
    if _is_followed(finding):
        return (
            f"nothing to do: the bridge already uses {_other_way(finding)}; drop the path that only {_series(old)} "
            f"needs when {_series(old)} leaves the matrix"
        )
    return "nothing to do" if finding.impact is Impact.HARMLESS else _fill(_words(finding).next_step, finding, old)


def headline_of_fault(finding: Finding) -> str:
    """What is wrong with a use that fails in both releases."""
    return _fill(_FAULTS.get(finding.kind, _words(finding).headline), finding)


def next_step_of_fault(old: str = "") -> str:
    """What to do about a use that fails in the old release already: staying there is no help."""
    return f"call it in a second way for releases like {_series(old)}, or leave them out of the matrix"


# --- documents ------------------------------------------------------------------------------------------------------


def summarize_static(result: StaticResult) -> str:
    """The answer in one or two sentences."""
    names = {verdict: [row.module for row in _rows(result) if row.verdict is verdict] for verdict in ModuleVerdict}
    broken, cascades, at_risk = (names[ModuleVerdict(word)] for word in ("breaks", "cascade", "risk"))
    clean = len(names[ModuleVerdict.CLEAN])
    rest = f" {count(clean, 'module is', 'modules are')} clean." if clean else ""
    if broken or cascades or result.breaks:
        also = f", and with {'it' if len(broken) == 1 else 'them'} {', '.join(cascades)}" if cascades else ""
        risks = f" {', '.join(at_risk)} at risk." if at_risk else ""
        return f"Breaks {', '.join(broken) or 'something that the bridge uses'}{also}.{risks}{rest}"
    if at_risk:
        return f"Nothing breaks; {', '.join(at_risk)} at risk.{rest}"
    if result.findings:
        return "Nothing breaks: no change to what the bridge uses touches its calls."
    return "Nothing that the bridge uses changed."


def describe_static(result: StaticResult, *, verbose: bool = False, first_bad_in: str = "") -> Document:
    """The answer for one pair of releases.

    Args:
        result: the pair.
        verbose: list harmless changes, consequences and API changes that the bridge does not use, too.
        first_bad_in: the module that this pair was searched for.
    """
    step = f"{result.old.version} → {result.new.version}"
    summary = summarize_static(result)
    if first_bad_in:
        summary = (
            f"`{first_bad_in}` breaks first in {result.new.version}; {result.old.version} is the last good release. "
            + summary
        )
    if result.downgrade:
        summary += f" This is a downgrade: {result.old.version} is the newer release."
    blocks = [
        *_describe_modules(result, verbose=verbose),
        *_describe_findings(result, verbose=verbose),
        *_describe_faults(result),
        *_describe_rest(result, verbose=verbose),
    ]
    return Document(f"Transformer Engine {step}", summary, mark_static(result), tuple(blocks), _cases(result))


def describe_sweep(sweep: Sweep, *, verbose: bool = False, first_bad_in: str = "") -> Document:
    """Every adjacent pair of releases: a grid of steps x modules, then what happened.

    Args:
        sweep: the pairs.
        verbose: list harmless changes, too.
        first_bad_in: the module for which no pair was found.
    """
    summary = summarize_sweep(sweep)
    if first_bad_in:
        summary = f"No release of {count(sweep.steps, 'step')} breaks `{first_bad_in}`. {summary}"
    modules = list(dict.fromkeys(row.module for step in sweep.steps for row in _rows(step)))
    grid = tuple((step.new.version, *(_grid_cell(step, module) for module in modules)) for step in sweep.steps)
    blocks: list[Block] = [Table(("release", *modules), grid, _GRID)] if grid else []
    for step in sweep.steps:
        if found := tuple(_describe_findings(step, verbose=verbose)):
            title = f"{step.old.version} → {step.new.version}{' (a downgrade)' if step.downgrade else ''}"
            blocks += [Heading(title, mark=mark_static(step)), *found]
    unread = tuple(
        Diagnostic(release, missing("not read"), "releases", reason, code="unreadable")
        for release, reason in sweep.unreadable.items()
    )
    changes = sum(step.not_consumed for step in sweep.steps)
    blocks += [*unread, Paragraph(f"{count(changes, 'other API change')} in all. {_limits()}")]
    mark = missing("nothing compared") if not sweep.steps else _worst([mark_static(step) for step in sweep.steps])
    cases = tuple(case for step in sweep.steps for case in _cases(step))
    return Document("Transformer Engine, release by release", summary, mark, tuple(blocks), (*cases, *unread))


def summarize_sweep(sweep: Sweep) -> str:
    """The answer in one sentence."""
    steps, breaking = count(sweep.steps, "step"), sum(step.breaks for step in sweep.steps)
    unread = f"; {count(sweep.unreadable, 'release')} could not be read" if sweep.unreadable else ""
    if not sweep.steps:
        return f"No step between releases was compared{unread}."
    risks = sum(mark_static(step).tone is Tone.RISK for step in sweep.steps)
    also = f", {risks} {'puts' if risks == 1 else 'put'} it at risk" if risks else ""
    verb = "breaks" if breaking in (0, 1) else "break"
    return f"{breaking or 'None'} of {steps} {verb} the bridge{also}{unread}."


def mark_static(result: StaticResult) -> Mark:
    """How the answer looks."""
    return _worst([VERDICTS[row.verdict] for row in _rows(result)] + ([bad("breaks")] if result.breaks else []))


def _worst(marks: Sequence[Mark]) -> Mark:
    tones = (Tone.BAD, Tone.RISK)
    return next((mark for tone in tones for mark in marks if mark.tone is tone), good("clean"))


def _rows(result: StaticResult) -> Iterator[ModuleResult]:
    """Every module; one without a row of its own must not hide its findings."""
    yield from result.modules
    known = {row.module for row in result.modules}
    for name in dict.fromkeys(finding.module for finding in result.findings if finding.module not in known):
        impacts = {finding.impact for finding in result.findings if finding.module == name}
        verdict = ModuleVerdict.RISK if Impact.RISK in impacts else ModuleVerdict.CLEAN
        yield ModuleResult(module=name, verdict=ModuleVerdict.BREAKS if Impact.BREAKING in impacts else verdict)


def _describe_modules(result: StaticResult, *, verbose: bool) -> Iterator[Block]:
    rows: list[tuple[Inline, ...]] = []
    for row in _rows(result):
        own = [finding for finding in result.findings if finding.module == row.module]
        shared = {one.module for one in result.findings if row.module in one.modules and one.module != row.module}
        numbers = {impact: sum(finding.impact is impact for finding in own) for impact in Impact}
        said = [f"{number} {IMPACTS[impact].word}" for impact, number in numbers.items() if number]
        under = [row.under] if row.under else sorted(shared)
        said += [f"filed under {', '.join(under)}"] if under else []
        if verbose or row.verdict is not ModuleVerdict.CLEAN:
            rows.append((row.module, VERDICTS[row.verdict], "; ".join(said)))
    if rows:
        yield Table(("bridge module", "verdict", "findings"), tuple(rows))


def _alike(finding: Finding) -> tuple[object, ...]:
    """Findings of one kind at the same lines of the bridge are shown together."""
    return finding.module, finding.kind, finding.impact, finding.call_sites, finding.follows


def _describe_findings(result: StaticResult, *, verbose: bool) -> Iterator[Block]:
    """What needs a look first; what the bridge already follows is folded."""
    shown = [one for one in result.findings if verbose or one.impact is not Impact.HARMLESS or one.follows]
    for _, group in groupby((one for one in shown if not _is_followed(one)), _alike):
        findings = list(group)
        yield _diagnose(findings[0], result) if verbose and not findings[1:] else _diagnose_briefly(findings, result)
    if followed := [one for one in shown if _is_followed(one)]:
        names = list(dict.fromkeys(map(_quoted_subject, followed)))
        more = f" and {len(names) - _MOST_NAMED} more" if names[_MOST_NAMED:] else ""
        listed = ", ".join(names[:_MOST_NAMED]) + more
        yield Paragraph(f"The bridge already follows {count(followed, 'change')}: {listed}.")
        yield Details("Changes that the bridge already follows", tuple(_diagnose(one, result) for one in followed))


def _diagnose_briefly(findings: Sequence[Finding], result: StaticResult) -> Diagnostic:
    """Findings of one kind at one place, in three lines or four: what changed, where, what to do."""
    first, old = findings[0], result.old.version
    headlines = list(dict.fromkeys(map(headline, findings)))
    seen = [(one.after or one.before, one.after is not None) for one in findings if one.after or one.before]
    lines: dict[str, list[int]] = {}
    for at, _ in seen:
        if at and at.line not in lines.setdefault(at.file, []):
            lines[at.file].append(at.line)
    places = "; ".join(f"{file}:{', '.join(map(str, numbers))}" for file, numbers in lines.items())
    where = f"{places} in {result.new.version if all(new for _, new in seen) else old}" if places else ""
    used = f"{_place(first.call_sites[0])}{_count_more(first.call_sites)}" if first.call_sites else ""
    return Diagnostic(
        name=headlines[0],
        mark=IMPACTS[first.impact],
        group=first.module,
        message="; ".join(headlines[1:]),
        fields=(("at", "; ".join(filter(None, (where, used and f"used by {used}")))),),
        help="; ".join(dict.fromkeys(next_step(finding, old) for finding in findings)),
        code=first.kind.value,
    )


def _count_more(sites: Sequence[SourceLine]) -> str:
    return f" and {len(sites) - 1} more" if sites[1:] else ""


def _diagnose(finding: Finding, result: StaticResult) -> Diagnostic:
    """A finding with all that is known about it."""
    old = result.old.version
    sides = ((old, finding.before), (result.new.version, finding.after))
    fields: list[tuple[str, Inline]] = [(version, _place(at)) for version, at in sides if at]
    fields += [("effect", consequence(finding))]
    fields += [("used", _place(site)) for site in finding.call_sites[1:]]
    fields += [("symbol", finding.symbol), ("cause", finding.cause.value)]
    if others := [module for module in finding.modules if module != finding.module]:
        fields.append(("also in", ", ".join(others)))
    return Diagnostic(
        name=_quoted_subject(finding),
        mark=IMPACTS[finding.impact],
        group=finding.module,
        message=headline(finding),
        fields=tuple(fields),
        help=next_step(finding, old),
        place=_place(finding.call_sites[0]) if finding.call_sites else None,
        code=finding.kind.value,
    )


def _describe_faults(result: StaticResult) -> Iterator[Block]:
    if not result.unchanged_faults:
        return
    yield Details(
        f"{count(result.unchanged_faults, 'call fails', 'calls fail')} in {result.old.version} already: not caused by "
        "this step",
        tuple(_diagnose_fault(finding, result) for finding in result.unchanged_faults),
    )


def _diagnose_fault(finding: Finding, result: StaticResult) -> Diagnostic:
    return Diagnostic(
        name=_quoted_subject(finding),
        mark=risk("fails in both"),
        group=finding.module,
        message=f"{headline_of_fault(finding)}; this fails in {result.old.version} already",
        help=next_step_of_fault(result.old.version),
        place=_place(finding.call_sites[0]) if finding.call_sites else None,
        code=finding.kind.value,
    )


def _describe_rest(result: StaticResult, *, verbose: bool) -> Iterator[Block]:
    hidden = sum(one.impact is Impact.HARMLESS and not one.follows for one in result.findings)
    hint = " (--verbose lists them)" if not verbose and (hidden or result.not_consumed) else ""
    changes = f"{count(result.not_consumed, 'other API change')} not used by the bridge{hint}."
    yield Paragraph(f"{changes} {_limits()}")
    if verbose:
        rows = tuple((what, why, where) for what, why, where in LIMITS)
        yield Details("What static analysis does not cover", (Table(("what", "why", "covered by"), rows),))
        if result.changes_not_consumed:
            yield Details("API changes that the bridge does not use", (Bullets(result.changes_not_consumed),))
        sources = (f"{one.version}: {one.wheel} sha256:{one.sha256}" for one in (result.old, result.new))
        yield Details("Sources", (Bullets(tuple(sources)),))


def _limits() -> str:
    return "Static analysis does not cover numerics, compiled code and performance; `--tiers gpu` does."


def _cases(result: StaticResult) -> tuple[Diagnostic, ...]:
    """Everything that was judged: each finding, then each module without one of its own."""
    cases = [_diagnose(finding, result) for finding in result.findings]
    owners = {finding.module for finding in result.findings if finding.impact is not Impact.HARMLESS}
    for row in _rows(result):
        if row.module not in owners:
            said = f"breaks with {row.under} and is filed under it" if row.under else "no finding"
            cases.append(Diagnostic(row.module, VERDICTS[row.verdict], row.module, said, code=row.verdict.value))
    return (*cases, *(_diagnose_fault(finding, result) for finding in result.unchanged_faults))


def _grid_cell(step: StaticResult, module: str) -> Inline:
    row = next((row for row in _rows(step) if row.module == module), None)
    if row is None:
        return ""
    if row.verdict is ModuleVerdict.CLEAN:
        return Mark("·", ".", "", Tone.QUIET)  # quieter than a tick: the others stand out
    number = sum(one.module == module and (one.impact is not Impact.HARMLESS or one.follows) for one in step.findings)
    mark = VERDICTS[row.verdict]
    return Mark(mark.symbol, mark.letter, str(number or ""), mark.tone)


# --- templates ------------------------------------------------------------------------------------------------------


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
        "subject": _quoted_subject(finding),
        "owner": _quote(_short(finding.symbol)) or "a symbol",
        "attribute": _quote(attribute) or "an attribute that the bridge reads",
        "module": _quote(finding.symbol) or "Transformer Engine",
        "parameter": _quote(finding.parameter),
        "no_parameter": "" if finding.parameter else "yes",
        # Recipes are dataclasses that take a field they do not know and drop it: no error says so.
        "ignored": "yes" if finding.cause is Cause.SILENT_FALLBACK else "",
        "keyword": _keyword(finding.parameter),
        "new_keyword": _keyword(renamed),
        "suggestion": _quote(finding.suggestion),
        "successor": _quote(_short(finding.suggestion)),
        "old": _quote(finding.old),
        "new": _quote(finding.new),
        "new_name": _quote(_short(finding.new)),
        "default": _quote(finding.old.removeprefix(f"{finding.parameter}=")),
        "was": _quote((finding.old or finding.symbol).removesuffix(last)),
        "now": _quote((finding.new or finding.suggestion).removesuffix(last)),
        "when": _quote(finding.suggestion.removeprefix("only if ")),
        "after": str(_place(finding.after)) if finding.after else "",
        "series": _series(old),
        "stay": f"stay on {_series(old)}.x" if old else "stay on the old release",
    }


def _quote(text: str) -> str:
    """A piece of source on one line between backticks; empty where there is none."""
    line = " ".join(text.replace("`", "'").split())
    return f"`{line if len(line) <= _LONGEST_QUOTE else line[: _LONGEST_QUOTE - 1] + '…'}`" if line else ""


def _quoted_subject(finding: Finding) -> str:
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


def _place(line: SourceLine) -> Place:
    return Place(line.file, line.line)


def _is_followed(finding: Finding) -> bool:
    # A breaking finding is never waved through: if the second path worked, it would not break.
    return finding.follows and finding.impact is not Impact.BREAKING


def _other_way(finding: Finding) -> str:
    # What moved keeps its name; only the place says which of the two is meant.
    same = _short(finding.suggestion) == _short(finding.symbol)
    return _quote(finding.suggestion if same else _short(finding.suggestion)) or "the new way"
