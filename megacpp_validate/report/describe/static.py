"""What the static tier found, as documents: one pair of releases, and every pair in a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from ...canary.static.findings import (
    Finding,
    Impact,
    ModuleResult,
    ModuleVerdict,
    StaticResult,
    Sweep,
)
from ...evidence.values import SourceLine
from ...text import count
from ..document import Block, Bullets, Details, Diagnostic, Document, Heading, Inline, Paragraph, Place, Table
from ..marks import Mark, Tone, bad, cascade, good, missing, quiet, risk
from .changes import consequence, headline, headline_of_fault, is_followed, next_step, next_step_of_fault, quote_subject

VERDICTS: Final = {
    ModuleVerdict.BREAKS: bad("breaks"),
    ModuleVerdict.CASCADE: cascade("breaks with its cause"),
    ModuleVerdict.RISK: risk("at risk"),
    ModuleVerdict.CLEAN: good("clean"),
}
IMPACTS: Final = {Impact.BREAKING: bad("breaking"), Impact.RISK: risk("risk"), Impact.HARMLESS: quiet("harmless")}
_MOST_NAMED: Final = 6
_LINE: Final = 98  # characters of a finding beside its mark
_GRID: Final = "Each release beside the one before it; a number counts findings."


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
        *_describe_clean(result),
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


def _describe_clean(result: StaticResult) -> Iterator[Block]:
    clean = [row.module for row in _rows(result) if row.verdict is ModuleVerdict.CLEAN]
    if clean and result.findings:
        yield Paragraph(f"Clean: {', '.join(clean)}.")


def _alike(finding: Finding) -> tuple[object, ...]:
    """Findings of one kind at the same lines of the bridge are shown together."""
    return finding.module, finding.kind, finding.impact, finding.call_sites, finding.follows


def _describe_findings(result: StaticResult, *, verbose: bool) -> Iterator[Block]:
    """What needs a look first; what the bridge already follows is folded."""
    shown = [one for one in result.findings if verbose or one.impact is not Impact.HARMLESS or one.follows]
    for _, group in groupby((one for one in shown if not is_followed(one)), _alike):
        if verbose:
            yield from (_diagnose(finding, result) for finding in group)
        else:
            yield from _describe_briefly(list(group), result)
    if followed := [one for one in shown if is_followed(one)]:
        names = list(dict.fromkeys(map(quote_subject, followed)))
        more = f" and {len(names) - _MOST_NAMED} more" if names[_MOST_NAMED:] else ""
        listed = ", ".join(names[:_MOST_NAMED]) + more
        yield Paragraph(f"The bridge already follows {count(followed, 'change')}: {listed}.")
        yield Details("Changes that the bridge already follows", tuple(_diagnose(one, result) for one in followed))


def _describe_briefly(findings: Sequence[Finding], result: StaticResult) -> Iterator[Block]:
    """Findings of one kind at one place: a line on what changed, and one on where and what to do."""
    first, old = findings[0], result.old.version
    also = list(dict.fromkeys(f"`{one.parameter or one.new or one.symbol}`" for one in findings[1:]))
    more = f"; also {', '.join(also)}" if also else ""
    what = _shorten(f"{first.module}: {headline(first)}", _LINE - len(more))
    yield Paragraph(f"{what}{more}", IMPACTS[first.impact])
    at, version = (first.after, result.new.version) if first.after else (first.before, old)
    where = f"{at.file.removeprefix('transformer_engine/')}:{at.line} in {version}" if at else ""
    used = str(_place(first.call_sites[0])) if first.call_sites else ""
    used += f" and {len(first.call_sites) - 1} more" if first.call_sites[1:] else ""
    yield Bullets(("; ".join(filter(None, (" <- ".join(filter(None, (where, used))), next_step(first, old)))),))


def _shorten(text: str, longest: int) -> str:
    """A text that ends with quoted code, which is cut until both fit into a line."""
    head, _, code = text.removesuffix("`").rpartition("`")
    over = len(text) - longest
    return f"{head}`{code[: -over - 1]}…`" if text.endswith("`") and 0 < over < len(code) - 1 else text


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
        name=quote_subject(finding),
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
        name=quote_subject(finding),
        mark=risk("fails in both"),
        group=finding.module,
        message=f"{headline_of_fault(finding)}; this fails in {result.old.version} already",
        help=next_step_of_fault(result.old.version),
        place=_place(finding.call_sites[0]) if finding.call_sites else None,
        code=finding.kind.value,
    )


def _describe_rest(result: StaticResult, *, verbose: bool) -> Iterator[Block]:
    hidden = sum(one.impact is Impact.HARMLESS and not one.follows for one in result.findings)
    hint = " (--verbose)" if not verbose and (hidden or result.not_consumed) else ""
    changes = f"{count(result.not_consumed, 'API change')} not used by the bridge{hint}."
    yield Paragraph(f"{changes} {_limits()}")
    if verbose:
        if result.changes_not_consumed:
            yield Details("API changes that the bridge does not use", (Bullets(result.changes_not_consumed),))
        sources = (f"{one.version}: {one.wheel} sha256:{one.sha256}" for one in (result.old, result.new))
        yield Details("Sources", (Bullets(tuple(sources)),))


def _limits() -> str:
    return "Not covered: numerics, speed (`--tiers gpu`)."


def _cases(result: StaticResult) -> tuple[Diagnostic, ...]:
    """Everything that was judged: each finding, then each module without one of its own."""
    cases = [_diagnose(finding, result) for finding in result.findings]
    owners = {finding.module for finding in result.findings if finding.impact is not Impact.HARMLESS}
    for row in _rows(result):
        if row.module not in owners:
            shared = sorted({one.module for one in result.findings if row.module in one.modules} - {row.module})
            said = f"breaks with {row.under} and is filed under it" if row.under else "no finding of its own"
            said += f"; shares findings of {', '.join(shared)}" if shared and not row.under else ""
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


def _place(line: SourceLine) -> Place:
    return Place(line.file, line.line)
