"""What the static tier found, as documents: one pair of releases, and every pair in a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from ...canary.static.findings import ChangeKind, Finding, Impact, ModuleVerdict, StaticResult, Sweep
from ...environments.fits import FitVerdict
from ...evidence.values import SourceLine
from ...text import count
from ..document import Block, Bullets, Details, Diagnostic, Document, Heading, Inline, Paragraph, Place, Table
from ..marks import Mark, Tone, bad, find_worst_mark, good, mark_of, missing, quiet, risk
from .changes import headline, is_followed, next_step, next_step_of_fault, quote_subject
from .words import describe_fit, list_some, tabulate_facts

_MOST_NAMED: Final = 6
_MOST_ROWS: Final = 8  # of the answer; a source tree has a row a file
_BRIDGE: Final = "the bridge of megacpp-validate"
_MEND: Final = "mend the file, run the canary with the Python version that the file needs, or give --source without it"
_LIMITS: Final = "Not covered: numerics, speed (`--tiers gpu`)."


def summarize_static(result: StaticResult) -> str:
    """The answer in one or two sentences."""
    names = {verdict: [row.module for row in result.modules if row.verdict is verdict] for verdict in ModuleVerdict}
    clean = names[ModuleVerdict.CLEAN]
    broken = names[ModuleVerdict.BREAKS] or (["something that the code uses"] if result.breaks else [])
    parts = {
        "": f"Breaks {list_some(broken, _MOST_ROWS)}" if broken else "Nothing breaks",
        "and with it ": list_some(names[ModuleVerdict.CASCADE], _MOST_ROWS),
        "at risk: ": list_some(names[ModuleVerdict.RISK], _MOST_ROWS),
        f"already fails under {result.old.version}: ": list_some(names[ModuleVerdict.FAILS_BEFORE], _MOST_ROWS),
        "clean: ": count(clean, "module") if len(clean) > _MOST_ROWS else ", ".join(clean),
    }
    answer = "; ".join(f"{label}{text}" for label, text in parts.items() if text) + "."
    if not broken and not names[ModuleVerdict.RISK] and not names[ModuleVerdict.FAILS_BEFORE]:
        changed = "no change to what the code uses touches its calls" if result.findings else "nothing changed"
        answer = f"Nothing breaks: {changed}."
    refused = ", ".join(
        f"{one.component} {one.seen} (needs {one.wanted})" for one in result.requirements_of(FitVerdict.REFUSED)
    )
    unknown = ", ".join(dict.fromkeys(one.component for one in result.requirements_of(FitVerdict.UNKNOWN)))
    answer += f" The environment does not meet {result.new.version}: {refused}." if refused else ""
    answer += f" Not judged: {count(result.not_read, 'file')} that cannot be read." if result.not_read else ""
    return answer + (f" Unknown requirements: {unknown} (--env)." if unknown else "")


def describe_static(result: StaticResult, *, verbose: bool = False) -> Document:
    """The answer for one pair of releases.

    Args:
        result: the pair.
        verbose: list harmless changes and API changes that the code does not use, too.
    """
    old, new = result.old.version, result.new.version
    downgrade = f" This is a downgrade: {old} is the newer release." if result.downgrade else ""
    faults = tuple(_list_faults(result))
    sources = {
        one.version if old != new else side: f"{one.wheel} sha256:{one.sha256}" if one.sha256 else one.wheel
        for side, one in (("old", result.old), ("new", result.new))
    }
    not_read = tuple(
        Diagnostic(file, missing("not judged"), "source", why, help=_MEND, place=Place(file), code="unreadable")
        for file, why in result.not_read.items()
    )
    unused = count(result.not_consumed, "API change")
    blocks: tuple[Block, ...] = (
        *map(describe_fit, result.requirements),
        *_describe_findings(result, verbose=verbose),
        *(Paragraph(f"{one.place or one.group}: {one.message}", one.mark) for one in faults[:_MOST_ROWS]),
        Details(f"Calls that fail in {old} already, not caused by this step: {len(faults)}", faults),
        *not_read,
        Paragraph(f"{unused} not used by this code (--verbose). {_LIMITS}"),
        Details("API changes that this code does not use", (Bullets(result.changes_not_consumed),)),
        Details("Sources", (tabulate_facts(sources),)),
    )
    title = f"{result.library} {old} → {new}, as {result.source or _BRIDGE} uses it"
    summary = f"{summarize_static(result)}{downgrade}"
    return Document(title, summary, mark_static(result), blocks, (*_list_cases(result), *not_read))


def describe_sweep(sweep: Sweep, *, verbose: bool = False) -> Document:
    """Every adjacent pair of releases: a grid of steps x modules, then what happened.

    Args:
        sweep: the pairs.
        verbose: list harmless changes, too.
    """
    modules = list(dict.fromkeys(row.module for step in sweep.steps for row in step.modules))
    grid = tuple((step.new.version, *(_grid_cell(step, module) for module in modules)) for step in sweep.steps)
    caption = (
        "Each release beside the one before it; a number counts findings. `fail before`: uses that fail in the older "
        "release already, so that the module runs in neither."
    )
    blocks: list[Block] = [Table(("release", *modules), grid, caption)]
    for step in sweep.steps:
        blocks.append(Heading(f"{step.old.version} → {step.new.version}", mark=mark_static(step)))
        blocks += _describe_findings(step, verbose=verbose)
    unread = tuple(
        Diagnostic(release, missing("not read"), "releases", reason, code="unreadable")
        for release, reason in sweep.unreadable.items()
    )
    changes = count(sum(step.not_consumed for step in sweep.steps), "other API change")
    blocks += [Heading("Not judged"), *unread, Paragraph(f"{changes} in all. {_LIMITS}")]
    tones = [mark_static(step).tone for step in sweep.steps]
    summary = (
        f"Of {count(sweep.steps, 'step')} between releases {tones.count(Tone.BAD)} break the code; at risk: "
        f"{tones.count(Tone.RISK)}; releases that could not be read: {len(sweep.unreadable)}."
    )
    mark = find_worst_mark(map(mark_static, sweep.steps), missing("nothing compared"))
    cases = tuple(case for step in sweep.steps for case in _list_cases(step))
    source = next((step.source for step in sweep.steps if step.source), _BRIDGE)
    title = f"Transformer Engine, release by release, as {source} uses it"
    return Document(title, summary, mark, tuple(blocks), (*cases, *unread))


def mark_static(result: StaticResult) -> Mark:
    """How the answer looks."""
    marks = [mark_of(row.verdict) for row in result.modules]
    unknown = [missing("unknown requirement")] if result.requirements_of(FitVerdict.UNKNOWN) else []
    unknown += [missing("not judged")] if result.not_read else []
    return find_worst_mark([*marks, *([bad("breaks")] if result.breaks else []), *unknown], good("clean"))


def _describe_findings(result: StaticResult, *, verbose: bool) -> Iterator[Block]:
    """What needs a look first; what the code already follows is folded."""
    shown = [one for one in result.findings if verbose or one.impact is not Impact.HARMLESS or one.follows]

    def alike(finding: Finding) -> tuple[object, ...]:
        """Findings of one kind at the same lines of the code are shown together."""
        return finding.module, finding.kind, finding.impact, finding.call_sites, finding.follows

    for _, group in groupby((one for one in shown if not is_followed(one)), alike):
        findings = list(group)
        yield from [_diagnose(one, result) for one in findings] if verbose else _describe_briefly(findings, result)
    if followed := [one for one in shown if is_followed(one)]:
        names = list_some(list(dict.fromkeys(map(quote_subject, followed))), _MOST_NAMED)
        yield Paragraph(f"The code already follows {count(followed, 'change')}: {names}.")
        yield Details("Changes that the code already follows", tuple(_diagnose(one, result) for one in followed))


def _describe_briefly(findings: Sequence[Finding], result: StaticResult) -> tuple[Block, Block]:
    """Findings of one kind at one place: a line on what changed, and one on where and what to do."""
    first, old = findings[0], result.old.version
    _, *also = dict.fromkeys(
        f"`{one.parameter or (one.kind is ChangeKind.DEPRECATED and one.suggestion) or one.new or one.symbol}`"
        for one in findings
    )
    more = f"; also {', '.join(also)}" if also else ""
    at, version = (first.after, result.new.version) if first.after else (first.before, old)
    where = f"{at.file.removeprefix('transformer_engine/')}:{at.line} in {version}" if at else ""
    used = list_some([str(_place(site)) for site in first.call_sites], _MOST_NAMED)
    used += " (--verbose lists all)" if len(first.call_sites) > _MOST_NAMED else ""
    places = " <- ".join(filter(None, (where, used)))
    return (
        Paragraph(f"{first.module}: {headline(first, old)}{more}", mark_of(first.impact)),
        Bullets(("; ".join(filter(None, (places, next_step(first, old)))),)),
    )


def _diagnose(finding: Finding, result: StaticResult) -> Diagnostic:
    """A finding with all that is known about it."""
    old = result.old.version
    sides = ((old, finding.before), (result.new.version, finding.after))
    checks = (ChangeKind.GUARD_ADDED, ChangeKind.WARNING_ADDED)  # their suggestion is what they say
    fields: list[tuple[str, Inline]] = [(version, _place(at)) for version, at in sides if at]
    fields += [("used", _place(site)) for site in finding.call_sites[1:]]
    fields += [("message", finding.suggestion if finding.kind in checks else "")]
    fields += [("symbol", finding.symbol), ("cause", finding.cause.value)]
    fields += [("also in", ", ".join(module for module in finding.modules if module != finding.module))]
    return Diagnostic(
        name=quote_subject(finding),
        mark=mark_of(finding.impact),
        group=finding.module,
        message=headline(finding, old),
        fields=tuple(fields),
        help=next_step(finding, old),
        place=_place(finding.call_sites[0]) if finding.call_sites else None,
        code=finding.kind.value,
    )


def _diagnose_each(finding: Finding, result: StaticResult) -> Iterator[Diagnostic]:
    """A finding once for each line of the code, under the module that the line is in."""
    case = _diagnose(finding, result)
    shared = tuple((label, content) for label, content in case.fields if label not in ("used", "also in"))
    if not finding.call_sites:
        yield case
    for site in finding.call_sites:
        own = site.file if site.file in finding.modules else finding.module
        yield replace(case, group=result.rows.get(site.file, own), fields=shared, place=_place(site))


def _list_faults(result: StaticResult) -> Iterator[Diagnostic]:
    """Lines that fail in the old release already."""
    old = result.old.version
    for finding in result.unchanged_faults:
        message = f"{headline(finding, old)}; this fails in {old} already"
        for case in _diagnose_each(finding, result):
            mark = risk("fails in both")
            yield replace(case, mark=mark, message=message, fields=(), help=next_step_of_fault(old))


def _list_cases(result: StaticResult) -> Iterator[Diagnostic]:
    """Everything that was judged: each line of a finding, each requirement, then modules without one of their own."""
    for finding in result.findings:
        yield from _diagnose_each(finding, result)
    places = {module: _place(site) for module, site in result.first_uses.items()}
    for fit in result.requirements:
        yield replace(describe_fit(fit), place=places.get(next(iter(fit.breaks or places), "")))
    owners = {module for one in result.findings if one.impact is not Impact.HARMLESS for module in one.modules}
    owners |= {fit.breaks[0] for fit in result.requirements_of(FitVerdict.REFUSED) if fit.breaks}
    owners |= {module for one in result.unchanged_faults for module in one.modules}
    for row in result.modules:
        if row.under or row.module not in owners:
            fields, message = (("breaks with", row.under),), "The module has no finding of its own."
            case = Diagnostic(row.module, mark_of(row.verdict), row.module, message, fields, code=row.verdict.value)
            yield replace(case, place=places.get(row.module))
    yield from _list_faults(result)


def _grid_cell(step: StaticResult, module: str) -> Inline:
    row = next((row for row in step.modules if row.module == module), None)
    failing = sum(module in one.modules for one in step.unchanged_faults)
    if row is None or row.verdict is ModuleVerdict.CLEAN:
        return risk(f"{failing} fail before") if failing else quiet("")  # quieter than a tick: others stand out
    number = sum(one.module == module and (one.impact is not Impact.HARMLESS or one.follows) for one in step.findings)
    return replace(mark_of(row.verdict), word=str(number or ""))


def _place(line: SourceLine) -> Place:
    return Place(line.file, line.line)
