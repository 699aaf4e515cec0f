"""What a step between stacks did and who is to blame, over all tiers; the run of the watch and its issue."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ...canary.dynamic.slowdown import describe_timing
from ...canary.dynamic.step import ModuleChange, StepResult
from ...canary.requirements import WheelRequirements
from ...canary.upgrade import UpgradeResult
from ...canary.watch import WatchResult
from ...diagnosis.blame import Change
from ...diagnosis.culprits import Culprit
from ...errors import Exit
from ...evidence.values import ENVIRONMENT
from ...text import count
from ..document import Block, Bullets, Content, Diagnostic, Document, Heading, Paragraph, Preformatted, Table
from ..marks import Mark, bad, cascade, find_worst_mark, good, mark_exit, mark_of, missing, risk
from .canary import describe_firewall, describe_requirements, summarize_firewall
from .static import describe_static, mark_static, summarize_static
from .words import join_same, tabulate_facts


def mark_step(step: StepResult) -> Mark:
    """How the step between two stacks looks; a slowdown is a risk here."""
    if step.breaks:
        return risk("slower") if all(culprit.is_slowdown for culprit in step.culprits) else bad("breaks")
    return missing("no evidence") if step.lost or _find_unseen(step) else good("breaks nothing")


def mark_upgrade(result: UpgradeResult) -> Mark:
    """How the answer looks."""
    if result.exit:
        return mark_exit(result.exit, closed="breaks")
    return find_worst_mark(map(mark_static, result.static), good("clean"))


def _mark_change(row: ModuleChange) -> Mark:
    if row.under:
        return cascade(f"by {row.under}")
    if row.change in (Change.REGRESSED, Change.FIXED, Change.SAME_FAILURE, Change.LOST):
        return mark_of(row.change)
    return missing("no evidence") if row.after is None else mark_of(row.after)


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
    parts = [f"static: {summarize_static(step)}" for step in result.static]
    parts += [f"firewall: {summarize_firewall(result.firewall)}"] if result.firewall is not None else []
    parts += [f"gpu: {step.after}: {summarize_step(step)}" for step in result.steps]
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
            (stack, *map(mark_of, outcomes.values())) for stack, outcomes in result.grid.stacks.items()
        )
        faults = join_same((case.name, case.message) for case in unusable)
        faults += join_same((f"not read: {file}", reason) for file, reason in result.grid.unreadable.items())
        blocks += [Table(("stack", *result.grid.modules), rows)]
        blocks += [Bullets(tuple(f"{names}: {reason}" for names, reason in faults))]
    cases: list[Diagnostic] = []
    for step in result.steps:
        blocks += [Heading(f"{step.before} → {step.after}", mark=mark_step(step)), Paragraph(summarize_step(step))]
        blocks += describe_step(step, {case.message for case in unusable}, verbose=verbose)
        cases += [*map(describe_culprit, step.culprits), *_list_modules(step)]
    documents = [describe_static(static, verbose=verbose) for static in result.static]
    if result.firewall is not None:
        documents.append(describe_firewall(result.firewall))
    for document in documents:
        blocks += [Heading(document.title, mark=document.mark), Paragraph(document.summary), *document.blocks]
        cases += document.cases
    ran, kept = (sum(len(getattr(stack, name)) for stack in result.stacks) for name in ("ran", "reused"))
    facts = {
        "tool": result.tool,
        "time": ", ".join(f"{tier} {seconds:.0f} s" for tier, seconds in result.seconds.items()),
        "cells run": str(ran or ""),
        "receipts kept": str(kept or ""),
    }
    usable = [one for one in result.stacks if not one.problem]
    facts |= {one.stack: "; ".join(filter(None, (one.environment, one.folder))) for one in usable}
    place = f" on {result.target}" if result.target else ""
    title = f"Upgrade canary{place}: {', '.join(result.tiers)}"
    blocks.append(tabulate_facts(facts))
    return Document(title, summarize_upgrade(result), mark_upgrade(result), tuple(blocks), (*cases, *unusable))


def describe_step(step: StepResult, reported: Collection[str] = (), *, verbose: bool = False) -> Iterator[Block]:
    """One step below its summary: culprits, timings, versions, and what has no evidence.

    Args:
        reported: reasons for missing evidence that the reader knows already.
    """
    yield from map(describe_culprit, step.culprits)
    yield Bullets(tuple(describe_timing(row) for row in step.timings if verbose or row.slower))
    yield Table(
        ("also changed", step.before, step.after),
        tuple((row.name, row.before or "not loaded", row.after or "not loaded") for row in step.versions),
    )
    lost = join_same(step.lost.items())
    yield Bullets(tuple(f"no evidence: {cells}: {why}" for cells, why in lost if why not in reported))


def describe_culprit(culprit: Culprit) -> Diagnostic:
    """Who is to blame, the evidence, and what to do."""
    label = "also slower" if culprit.is_slowdown else "also changed" if culprit.green else "fails with it"
    fields = (
        ("evidence", culprit.evidence), ("TE", ", ".join(culprit.entry_points)), (label, ", ".join(culprit.cascades)),
    )  # fmt: skip
    name, code = name_culprit(culprit), culprit.cause.value
    return Diagnostic(name, bad("culprit"), culprit.module, culprit.summary, fields, culprit.next_step, code=code)


def _list_modules(step: StepResult) -> Iterator[Diagnostic]:
    """Modules that are no culprits, and cells without evidence, for formats that list everything."""
    group = f"{step.before} → {step.after}"
    culprits = {culprit.module for culprit in step.culprits}
    for row in step.modules:
        if row.module not in culprits and row.change is not Change.LOST:
            yield Diagnostic(row.module, _mark_change(row), group, row.reason, code=row.change.value)
    for cell, reason in step.lost.items():
        yield Diagnostic(cell, missing("no evidence"), group, reason, code="lost")


def describe_watch(result: WatchResult) -> Document:
    """What is new, the verdict on it, and where its issue text lies."""
    unjudged = tuple(
        Diagnostic(name, missing("no verdict"), "releases", reason, help="the next run tries again", code="no-verdict")
        for name, reason in result.failed.items()
    )
    judged = (
        Diagnostic(
            row.version, bad("breaks") if row.code == Exit.CLOSED else good("open"), "releases",
            fields=(("judged against", result.pinned), ("issue", row.issue)),
        )
        for row in result.judged
    )  # fmt: skip
    cases = (*judged, *unjudged)
    broken = ", ".join(row.version for row in result.judged if row.code == Exit.CLOSED)
    summary = (
        f"{count(result.judged, 'new release')}; breaks the bridge: {broken or 'none'}; without a verdict: "
        f"{len(unjudged)}; on the index: {result.listed}; pinned: {result.pinned}."
    )
    mark = find_worst_mark((case.mark for case in cases), good("nothing new"))
    return Document("Releases of Transformer Engine", summary, mark, cases)


def describe_release(result: UpgradeResult, release: str, wheels: WheelRequirements) -> Document:
    """The issue about a new release; its title is the same whatever is found out about the release."""
    against = result.static[0].old.version if result.static else "the pinned release"
    again, needs = f"./nox -s te_canary -- {against} {release}", describe_requirements(wheels)
    blocks = [block for static in result.static for block in describe_static(static).blocks]
    if result.firewall is not None:
        laid_out = ", ".join(dict.fromkeys(case.release for case in result.firewall.cases))
        blocks.append(Paragraph(f"On damaged installs of {laid_out}: {summarize_firewall(result.firewall)}"))
    blocks += [
        Heading("Next steps"),
        Paragraph("Follow the next step of each finding above. Then run every module in both releases on a GPU."),
        Preformatted(f"{again} --tiers static,firewall\n{again} --tiers gpu --target h200"),
        Heading(needs.title, mark=needs.mark),
        Paragraph(needs.summary),
        *needs.blocks,
    ]
    title = f"Transformer Engine {release} against {against}"
    return Document(title, summarize_upgrade(result), mark_upgrade(result), tuple(blocks))
