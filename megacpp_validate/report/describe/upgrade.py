"""What a step between stacks did and who is to blame, as a document over all tiers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from ...canary.dynamic.upgrade_result import (
    Change,
    Culprit,
    ModuleChange,
    StepResult,
    TimingChange,
    UpgradeResult,
)
from ...evidence.receipt import Outcome
from ...evidence.values import ENVIRONMENT
from ...text import count
from ..document import Block, Bullets, Content, Details, Diagnostic, Document, Heading, Inline, Paragraph, Table
from ..marks import Mark, bad, cascade, good, missing, quiet, risk
from .firewall import describe_firewall, summarize_firewall
from .static import describe_static, summarize_static

OUTCOMES: Final = {
    Outcome.PASS: good("pass"),
    Outcome.FAIL: bad("fail"),
    Outcome.ERROR: bad("error"),
    Outcome.IMPORT_ERROR: bad("import error"),
    Outcome.BLOCKED: cascade("blocked"),
    Outcome.EXPECTED_UNSUPPORTED: quiet("unsupported"),
    Outcome.TIMEOUT: bad("timeout"),
    Outcome.NOT_RUN: missing("not run"),
}
_CHANGES: Final = {
    Change.REGRESSED: bad("regressed"),
    Change.FIXED: good("fixed"),
    Change.SAME_FAILURE: bad("same failure"),
    Change.LOST: missing("no evidence"),
}


def mark_change(row: ModuleChange) -> Mark:
    """How one module of a step looks."""
    if row.under:
        return cascade(f"by {row.under}")
    if row.change in _CHANGES:
        return _CHANGES[row.change]
    if row.after is None:
        return missing("no evidence")
    seen = OUTCOMES[row.after]
    word = f"new: {seen.word}" if row.change is Change.NEW else "unchanged" if row.after.is_good else seen.word
    return Mark(seen.symbol, seen.letter, word, seen.tone)


def name_culprit(culprit: Culprit) -> str:
    """Who, in one phrase: "attention (environment: cuDNN)"."""
    who = "the environment, not a module" if culprit.module == ENVIRONMENT else culprit.module
    component = f": {culprit.component}" if culprit.component else ""
    return f"{who} ({culprit.cause.value}{component})"


def summarize_step(step: StepResult) -> str:
    """The answer for one step in one sentence."""
    unseen = [row.module for row in step.modules if row.change is Change.NEW and row.after and row.after.is_good]
    cascades = [name for culprit in step.culprits for name in culprit.cascades]
    nobody = "the evidence blames nothing" if step.lost or unseen else "breaks nothing"
    parts = (
        (f"breaks {' and '.join(map(name_culprit, step.culprits))}" if step.culprits else nobody),
        ("with it: ", cascades),
        ("fixes ", [row.module for row in step.modules if row.change is Change.FIXED]),
        ("still fails as before: ", [row.module for row in step.modules if row.change is Change.SAME_FAILURE]),
        ("no evidence for ", step.lost),
        (f"{step.before} has no receipt of ", unseen),
    )
    said = [part if isinstance(part, str) else f"{part[0]}{', '.join(part[1])}" for part in parts if part[-1]]
    sentence = "; ".join(said)
    return f"{sentence[0].upper()}{sentence[1:]}."


def summarize_upgrade(result: UpgradeResult) -> str:
    """The answer of every tier that was asked for in a few words each."""
    parts = []
    if len(result.static) == 1:
        parts.append(f"static: {summarize_static(result.static[0])}")
    elif result.static:
        breaking = sum(step.breaks for step in result.static)
        parts.append(f"static: {breaking} of {count(result.static, 'step')} break the bridge.")
    if result.firewall is not None:
        parts.append(f"firewall: {summarize_firewall(result.firewall)}")
    if result.grid is not None:
        parts.append(f"gpu: {_summarize_steps(result)}")
    return " ".join(parts) or "No tier ran: nothing is known."


def describe_upgrade(result: UpgradeResult, *, verbose: bool = False) -> Document:
    """The grid, the blame of every step, and what the other tiers found."""
    blocks = [*_describe_grid(result)]
    cases = []
    for step in result.steps:
        blocks += [Heading(f"{step.before} → {step.after}", mark=mark_step(step)), Paragraph(summarize_step(step))]
        blocks += describe_step(step, {stack.problem for stack in result.stacks}, verbose=verbose)
        cases += [*map(_diagnose, step.culprits), *_list_modules(step)]
    for static in result.static:
        document = describe_static(static, verbose=verbose)
        blocks += [Heading(document.title, mark=document.mark), Paragraph(document.summary), *document.blocks]
        cases += document.cases
    if result.firewall is not None:
        document = describe_firewall(result.firewall, verbose=verbose)
        blocks += [Heading(document.title, mark=document.mark), Paragraph(document.summary)]
        blocks += document.blocks if verbose or not result.firewall.holds else ()
        cases += document.cases
    cases += [
        Diagnostic(stack.stack, missing("not usable"), "stacks", stack.problem, code="no-environment")
        for stack in result.stacks
        if stack.problem
    ]
    blocks += _describe_runs(result)
    where = f" on {result.target}" if result.target else ""
    title = f"Upgrade canary{where}: {', '.join(result.tiers)}"
    return Document(title, summarize_upgrade(result), mark_upgrade(result), tuple(blocks), tuple(cases))


def mark_upgrade(result: UpgradeResult) -> Mark:
    """How the answer looks."""
    if result.breaks:
        return bad("breaks")
    if result.lacks or result.unmade:
        return missing("evidence missing")
    at_risk = any(row.verdict.value == "risk" for step in result.static for row in step.modules)
    return risk("at risk") if at_risk else good("clean")


def describe_timing(row: TimingChange) -> str:
    """One use before and after, beside the noise."""
    if not row.noise:
        return f"{row.name}: {row.before_ms:.3g} → {row.after_ms:.3g} ms, {row.derivation}"
    verdict = "slower" if row.slower else "within the noise"
    return (
        f"{row.name}: {row.before_ms:.3g} → {row.after_ms:.3g} ms ({row.ratio:.2f} x; two runs of one stack differ by "
        f"up to {row.noise:.2f} x): {verdict}"
    )


def _summarize_steps(result: UpgradeResult) -> str:
    if len(result.steps) == 1:
        return summarize_step(result.steps[0])
    unmade = [stack.stack for stack in result.stacks if stack.problem]
    without = f" {', '.join(unmade)} could not be made usable." if unmade else ""
    names = [
        f"{step.after} {' and '.join(one.module for one in step.culprits)}" for step in result.steps if step.breaks
    ]
    lost = " that has evidence" if any(step.lost for step in result.steps) else ""
    breaking = f": {'; '.join(names)}" if names else lost
    return f"{len(names)} of {count(result.steps, 'step')} break something{breaking}.{without}"


def _describe_grid(result: UpgradeResult) -> Iterator[Block]:
    if (grid := result.grid) is None:
        return
    rows: tuple[tuple[Inline, ...], ...] = tuple(
        (row.stack, *(OUTCOMES[cell.outcome] for cell in row.cells)) for row in grid.rows
    )
    yield Table(("stack", *grid.modules), rows)
    problems = {stack.stack: stack.problem for stack in result.stacks if stack.problem}
    faults = [f"{names}: {reason}" for names, reason in _by_reason(problems)]
    faults += [f"not read: {file}: {reason}" for file, reason in grid.unreadable.items()]
    if faults:
        yield Bullets(tuple(faults))


def describe_step(step: StepResult, reported: Collection[str] = (), *, verbose: bool = False) -> Iterator[Block]:
    """One step below its summary: culprits, timings, versions, and what has no evidence.

    Args:
        reported: reasons for missing evidence that the reader knows already.
    """
    yield from map(_diagnose, step.culprits)
    slower = [row for row in step.timings if row.slower]
    if times := tuple(f"{row.module}: {describe_timing(row)}" for row in (step.timings if verbose else slower)):
        yield Bullets(times)
    elif step.timings:
        compared = sum(bool(row.noise) for row in step.timings)
        left = len(step.timings) - compared
        also = f"; {left} could not be compared (--verbose says why)" if left else ""
        yield Paragraph(f"{count(compared, 'timed use')}: none is slower beyond the noise of the card{also}.")
    if step.versions:
        changes = (f"{row.name} {row.before or 'not loaded'} → {row.after or 'not loaded'}" for row in step.versions)
        yield Paragraph(f"Also changed: {', '.join(changes)}.")
    if lost := [f"no evidence: {cells}: {why}" for cells, why in _by_reason(step.lost) if why not in reported]:
        yield Bullets(tuple(lost))
    rows: tuple[tuple[Content, ...], ...] = tuple(
        (row.module, mark_change(row), _name_outcome(row.before), _name_outcome(row.after)) for row in step.modules
    )
    yield Details("Every module", (Table(("module", "change", step.before, step.after), rows),))


def mark_step(step: StepResult) -> Mark:
    """How the step between two stacks looks; a slowdown is a risk here."""
    if step.breaks:
        return risk("slower") if all(culprit.is_slowdown for culprit in step.culprits) else bad("breaks")
    unseen = any(row.before is None and row.after is not None and row.after.is_good for row in step.modules)
    return missing("no evidence") if step.lost or unseen else good("breaks nothing")


def _diagnose(culprit: Culprit) -> Diagnostic:
    how = "slower" if culprit.is_slowdown else "changed" if culprit.green else "red"
    fields: tuple[tuple[str, Content], ...] = (
        ("evidence", culprit.evidence),
        ("TE", ", ".join(culprit.entry_points)),
        (f"{how} by it", ", ".join(culprit.cascades)),
    )
    return Diagnostic(
        name=name_culprit(culprit),
        mark=bad("culprit"),
        group=culprit.module,
        message=culprit.summary,
        fields=tuple((label, content) for label, content in fields if content),
        help=culprit.next_step,
        code=culprit.cause.value,
    )


def _list_modules(step: StepResult) -> Iterator[Diagnostic]:
    """Modules that are no culprits, and cells without evidence, for formats that list everything."""
    culprits = {culprit.module for culprit in step.culprits}
    for row in step.modules:
        if row.module not in culprits and row.change is not Change.LOST:
            message = row.reason or f"{_name_outcome(row.before)} → {_name_outcome(row.after)}"
            yield Diagnostic(
                row.module, mark_change(row), f"{step.before} → {step.after}", message, code=row.change.value
            )
    for cell, reason in step.lost.items():
        yield Diagnostic(cell, missing("no evidence"), f"{step.before} → {step.after}", reason, code="lost")


def _describe_runs(result: UpgradeResult) -> Iterator[Block]:
    seconds = ", ".join(f"{tier} {seconds:.0f} s" for tier, seconds in result.seconds.items())
    ran, kept = (sum(len(getattr(stack, name)) for stack in result.stacks) for name in ("ran", "reused"))
    again = f", {count(kept, 'receipt')} of an earlier run kept (--fresh runs all)" if kept else ""
    cells = f"{count(ran, 'cell')} run{again}; " if result.stacks else ""
    yield Paragraph(f"{cells}{result.tool}; {seconds}.")
    if places := [stack for stack in result.stacks if not stack.problem]:
        came = (
            f"{one.stack}: {one.environment + '; ' if one.environment else ''}receipts in {one.folder}"
            for one in places
        )
        yield Bullets(tuple(came))


def _by_reason(reasons: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Names of one reason together."""
    found: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        found.setdefault(reason, []).append(name)
    return [(", ".join(names), reason) for reason, names in found.items()]


def _name_outcome(outcome: Outcome | None) -> str:
    return "no receipt" if outcome is None else OUTCOMES[outcome].word
