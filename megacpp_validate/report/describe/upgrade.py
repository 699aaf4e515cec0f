"""What a step between stacks did and who is to blame, as a document over all tiers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from ...canary.dynamic.upgrade_result import (
    Change,
    Culprit,
    ModuleChange,
    StepResult,
    TimingChange,
    UpgradeResult,
)
from ...environments.fits import FitVerdict
from ...evidence.receipt import Outcome
from ...evidence.values import ENVIRONMENT
from ...text import count
from ..document import Block, Bullets, Content, Details, Diagnostic, Document, Heading, Paragraph, Table
from ..marks import Mark, bad, cascade, good, mark_of, missing, risk
from .firewall import describe_firewall, summarize_firewall
from .static import describe_static, summarize_static
from .words import join_same, tabulate_facts


def mark_change(row: ModuleChange) -> Mark:
    """How one module of a step looks."""
    if row.under:
        return cascade(f"by {row.under}")
    if row.change in (Change.REGRESSED, Change.FIXED, Change.SAME_FAILURE):
        return mark_of(row.change)
    if row.change is Change.LOST or row.after is None:
        return missing("no evidence")
    mark = mark_of(row.after)
    if row.change is Change.NEW:
        return replace(mark, word=f"new: {mark.word}")
    return good("unchanged") if row.after.is_good else mark


def mark_step(step: StepResult) -> Mark:
    """How the step between two stacks looks; a slowdown is a risk here."""
    if step.breaks:
        return risk("slower") if all(culprit.is_slowdown for culprit in step.culprits) else bad("breaks")
    return missing("no evidence") if step.lost or _find_unseen(step) else good("breaks nothing")


def mark_upgrade(result: UpgradeResult) -> Mark:
    """How the answer looks."""
    if result.breaks:
        return bad("breaks")
    if result.lacks or result.unmade:
        return missing("evidence missing")
    if any(step.requirements_of(FitVerdict.UNKNOWN) for step in result.static):
        return missing("unknown requirement")
    at_risk = any(row.verdict.value == "risk" for step in result.static for row in step.modules)
    return risk("at risk") if at_risk else good("clean")


def name_culprit(culprit: Culprit) -> str:
    """Who, in one phrase: "attention (environment: cuDNN)"."""
    who = "the environment, not a module" if culprit.module == ENVIRONMENT else culprit.module
    return f"{who} ({': '.join(filter(None, (culprit.cause.value, culprit.component)))})"


def summarize_step(step: StepResult) -> str:
    """The answer for one step in one sentence."""
    unseen = _find_unseen(step)
    nobody = "The evidence blames nothing" if step.lost or unseen else "Breaks nothing"
    lists = {
        "with it": [name for culprit in step.culprits for name in culprit.cascades],
        "fixes": [row.module for row in step.modules if row.change is Change.FIXED],
        "still fails as before": [row.module for row in step.modules if row.change is Change.SAME_FAILURE],
        "no evidence for": list(step.lost),
        f"no receipt of {step.before} for": unseen,
    }
    first = f"Breaks {' and '.join(map(name_culprit, step.culprits))}" if step.culprits else nobody
    return "; ".join([first, *(f"{what}: {', '.join(names)}" for what, names in lists.items() if names)]) + "."


def _find_unseen(step: StepResult) -> list[str]:
    """Modules that hold after the step, and of which nothing is known before it."""
    return [row.module for row in step.modules if row.before is None and row.after and row.after.is_good]


def summarize_upgrade(result: UpgradeResult) -> str:
    """The answer of every tier in a few words each."""
    parts = [f"static: {summarize_static(step)}" for step in result.static[:1]]
    if len(result.static) > 1:
        parts = [
            f"static: {sum(step.breaks for step in result.static)} of {len(result.static)} steps break the bridge."
        ]
    if result.firewall is not None:
        parts.append(f"firewall: {summarize_firewall(result.firewall)}")
    if result.grid is not None and len(result.steps) == 1:
        parts.append(f"gpu: {summarize_step(result.steps[0])}")
    elif result.grid is not None:
        names = [f"{step.after} {name_culprit(one)}" for step in result.steps for one in step.culprits]
        breaking = sum(step.breaks for step in result.steps)
        parts.append(f"gpu: {breaking} of {count(result.steps, 'step')} break something: {', '.join(names) or 'none'}.")
    return " ".join(parts) or "No tier ran: nothing is known."


def describe_upgrade(result: UpgradeResult, *, verbose: bool = False) -> Document:
    """The grid, the blame of every step, and what the other tiers found."""
    unusable = [
        Diagnostic(stack.stack, missing("not usable"), "stacks", stack.problem, code="no-environment")
        for stack in result.stacks
        if stack.problem
    ]
    blocks: list[Block] = []
    if result.grid is not None:
        rows: tuple[tuple[Content, ...], ...] = tuple(
            (row.stack, *(mark_of(cell.outcome) for cell in row.cells)) for row in result.grid.rows
        )
        faults = join_same((case.name, case.message) for case in unusable)
        faults += join_same((f"not read: {file}", reason) for file, reason in result.grid.unreadable.items())
        blocks += [Table(("stack", *result.grid.modules), rows)]
        blocks += [Bullets(tuple(f"{names}: {reason}" for names, reason in faults))]
    cases: list[Diagnostic] = []
    for step in result.steps:
        blocks += [Heading(f"{step.before} → {step.after}", mark=mark_step(step)), Paragraph(summarize_step(step))]
        blocks += describe_step(step, {case.message for case in unusable}, verbose=verbose)
        cases += [*map(_diagnose, step.culprits), *_list_modules(step)]
    documents = [describe_static(static, verbose=verbose) for static in result.static]
    if result.firewall is not None:
        documents.append(describe_firewall(result.firewall, verbose=verbose))
    for document in documents:
        blocks += [Heading(document.title, mark=document.mark), Paragraph(document.summary), *document.blocks]
        cases += document.cases
    blocks += _describe_runs(result)
    title = f"Upgrade canary {f'on {result.target}' if result.target else ''}: {', '.join(result.tiers)}"
    return Document(title, summarize_upgrade(result), mark_upgrade(result), tuple(blocks), (*cases, *unusable))


def _describe_runs(result: UpgradeResult) -> Iterator[Block]:
    ran, kept = (sum(len(getattr(stack, name)) for stack in result.stacks) for name in ("ran", "reused"))
    yield tabulate_facts(
        {
            "tool": result.tool,
            "time": ", ".join(f"{tier} {seconds:.0f} s" for tier, seconds in result.seconds.items()),
            "cells run": str(ran or ""),
            "kept (--fresh runs all)": str(kept or ""),
            **{
                one.stack: "; ".join(filter(None, (one.environment, one.folder)))
                for one in result.stacks
                if not one.problem
            },
        }
    )


def describe_timing(row: TimingChange) -> str:
    """One use before and after, beside the noise."""
    times = f"{row.name}: {row.before_ms:.3g} → {row.after_ms:.3g} ms"
    if not row.noise:
        return f"{times}, {row.derivation}"
    verdict = "slower" if row.slower else "within the noise"
    return f"{times} ({row.ratio:.2f} x; two runs of one stack differ by up to {row.noise:.2f} x): {verdict}"


def describe_step(step: StepResult, reported: Collection[str] = (), *, verbose: bool = False) -> Iterator[Block]:
    """One step below its summary: culprits, timings, versions, and what has no evidence.

    Args:
        reported: reasons for missing evidence that the reader knows already.
    """
    yield from map(_diagnose, step.culprits)
    yield Bullets(tuple(f"{row.module}: {describe_timing(row)}" for row in step.timings if verbose or row.slower))
    if step.timings and not any(row.slower for row in step.timings):
        compared = sum(bool(row.noise) for row in step.timings)
        left = len(step.timings) - compared
        yield Paragraph(
            f"Timed uses: {compared} not slower than the noise, {left} not compared (--verbose lists them)."
        )
    yield Table(
        ("also changed", step.before, step.after),
        tuple((row.name, row.before or "not loaded", row.after or "not loaded") for row in step.versions),
    )
    lost = join_same(step.lost.items())
    yield Bullets(tuple(f"no evidence: {cells}: {why}" for cells, why in lost if why not in reported))
    rows = tuple(
        (row.module, mark_change(row), _name_outcome(row.before), _name_outcome(row.after)) for row in step.modules
    )
    yield Details("Every module", (Table(("module", "change", step.before, step.after), rows),))


def _diagnose(culprit: Culprit) -> Diagnostic:
    how = "slower" if culprit.is_slowdown else "changed" if culprit.green else "red"
    return Diagnostic(
        name=name_culprit(culprit),
        mark=bad("culprit"),
        group=culprit.module,
        message=culprit.summary,
        fields=(
            ("evidence", culprit.evidence),
            ("TE", ", ".join(culprit.entry_points)),
            (f"{how} by it", ", ".join(culprit.cascades)),
        ),
        help=culprit.next_step,
        code=culprit.cause.value,
    )


def _list_modules(step: StepResult) -> Iterator[Diagnostic]:
    """Modules that are no culprits, and cells without evidence, for formats that list everything."""
    group = f"{step.before} → {step.after}"
    culprits = {culprit.module for culprit in step.culprits}
    for row in step.modules:
        if row.module not in culprits and row.change is not Change.LOST:
            message = row.reason or f"{_name_outcome(row.before)} → {_name_outcome(row.after)}"
            yield Diagnostic(row.module, mark_change(row), group, message, code=row.change.value)
    for cell, reason in step.lost.items():
        yield Diagnostic(cell, missing("no evidence"), group, reason, code="lost")


def _name_outcome(outcome: Outcome | None) -> str:
    return "no receipt" if outcome is None else mark_of(outcome).word
