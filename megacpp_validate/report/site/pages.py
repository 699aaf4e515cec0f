"""The pages about many cells: overview, target, blame, training, environments, gate and files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from megacpp_validate.evidence.receipt import Receipt, TrainingRecord
from megacpp_validate.text import count

from ...canary.dynamic.upgrade_result import StepResult
from ...gate.decision import GateDecision
from ..describe.training import describe_training
from ..describe.upgrade import describe_step, name_culprit, summarize_step
from ..document import (
    Block,
    Content,
    Details,
    Document,
    Heading,
    Link,
    Mark,
    Paragraph,
    Table,
    Tone,
    bad,
    good,
    missing,
    quiet,
    risk,
)
from ..render.html import make_anchor
from .folder import name_page
from .history import CellHistory, StackHistory

MODULES: Final = "bridge modules"
_GROUPS: Final = (("fp8_", "FP8"), ("smoke_", "training smoke"))
_OTHERS: Final = "other cells"
_MOST_STACKS: Final = 20  # of one target on the first page
_MOST_STEPS: Final = 20
_MOST_RUNS: Final = 40  # of training that are drawn
_MOST_FILES: Final = 500


@dataclass
class Site:
    """What the pages show; filled while receipts are read one at a time.

    Attributes:
        modules: ids of the bridge modules, in dependency order.
        stacks: by target, the newest release first.
        full: (target, stack) whose cells have pages of their own.
        environments: (target, stack) -> fact -> its values.
        runs: the training run that each cell is about.
        gates: decisions of the release gate, in words.
        foreign: titles of decisions that were made of other receipts.
        results: page of a result that lies beside the receipts -> its file.
    """

    store: str
    made_at: str
    modules: tuple[str, ...]
    stacks: list[StackHistory] = field(default_factory=list)
    full: frozenset[tuple[str, str]] = frozenset()
    steps: list[StepResult] = field(default_factory=list)
    environments: dict[tuple[str, str], dict[str, set[str]]] = field(default_factory=dict)
    runs: list[tuple[Receipt, TrainingRecord]] = field(default_factory=list)
    gates: list[tuple[GateDecision, Document, bool]] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)

    def page_of(self, cell: CellHistory) -> str:
        """Where a cell is shown: on its own page, or on that of its target."""
        if (cell.target, cell.stack) in self.full:
            return name_page("cell", cell.cell)
        return name_page("target", cell.target)

    @property
    def targets(self) -> list[str]:
        """Every target that a receipt is of."""
        return list(dict.fromkeys(stack.target for stack in self.stacks))


def list_pages(site: Site) -> tuple[Link, ...]:
    """The pages that every page links to; a page without content is left out."""
    named = {
        "index.html": ("Overview", True),
        "steps.html": ("Blame", bool(site.steps)),
        "gate.html": ("Release gate", bool(site.gates)),
        "training.html": ("Training", bool(site.runs)),
        "environments.html": ("Environments", bool(site.environments)),
        "files.html": ("Files", True),
    }
    return tuple(Link(text, page) for page, (text, shown) in named.items() if shown)


def describe_overview(site: Site) -> Document:
    """The answer, the grids of the newest releases, and what is to blame."""
    summary, mark = _answer(site)
    blocks: list[Block] = []
    for decision, document, foreign in site.gates:
        name = f"{decision.stack} on {decision.target}"
        blocks.append(
            Paragraph(f"Release gate, {name}: {document.summary}", _mark_gate(document.mark, foreign=foreign))
        )
    for target in site.targets:
        stacks = [stack for stack in site.stacks if stack.target == target]
        with_modules = [stack for stack in stacks if not stack.cells.keys().isdisjoint(site.modules)]
        blocks.append(Heading(f"On {target}"))
        if with_modules:
            blocks.append(_tabulate_grid(site, with_modules[:_MOST_STACKS], site.modules, ""))
        link = Link(f"Every cell on {target}", name_page("target", target))
        rows = [(name, _count_good(stacks, probes)) for name, probes in _group_probes(stacks, site.modules).items()]
        blocks.append(Table(("cells", "hold"), (*rows, (link, "")), optional=frozenset()))
    if site.steps:
        blocks += [Heading("What releases broke"), _tabulate_steps(site.steps[:_MOST_STEPS])]
    if site.unreadable:
        files = count(len(site.unreadable), "file")
        blocks.append(Paragraph(f"{files} could not be read as a receipt: their cells are lost.", missing()))
    blocks.append(Paragraph(f"Receipts: `{site.store}`; made {site.made_at}."))
    return Document("Does the bridge to Transformer Engine hold?", summary, mark, tuple(blocks))


def describe_target(site: Site, target: str) -> Document:
    """Every cell on one target, in grids of modules, FP8, training and the rest."""
    stacks = [stack for stack in site.stacks if stack.target == target]
    summary, mark = _answer_target(stacks, site.modules)
    blocks: list[Block] = []
    for name, probes in _group_probes(stacks, site.modules).items():
        shown = [stack for stack in stacks if not stack.cells.keys().isdisjoint(probes)]
        if shown:
            blocks += [Heading(name.capitalize()), _tabulate_grid(site, shown, probes, "../")]
    return Document(f"Every cell on {target}", summary, mark, tuple(blocks))


def describe_steps(site: Site) -> Document:
    """Every step between adjacent releases."""
    breaking = sum(step.breaks for step in site.steps)
    verb = "breaks" if len(site.steps) == 1 else "break"
    blocks: list[Block] = [_tabulate_steps(site.steps)]
    for step in site.steps:
        blocks += [Heading(name_step(step), mark=mark_step(step)), Paragraph(summarize_step(step))]
        blocks += describe_step(step)
        compared = _compare_environments(site, [(step.target, step.before), (step.target, step.after)])
        if differing := tuple(row for row in compared if row[1] and row[2] and row[1] != row[2]):
            title = f"{count(len(differing), 'other fact')} of the environments differ"
            blocks.append(Details(title, (Table(("fact", step.before, step.after), differing),)))
    lost = any(mark_step(step).tone is Tone.MISSING for step in site.steps)
    mark = bad("breaks") if breaking else missing() if lost else good("breaks nothing")
    return Document(
        "What releases broke", f"{breaking} of {count(site.steps, 'step')} {verb} something.", mark, tuple(blocks)
    )


def describe_runs(site: Site) -> Document:
    """Loss curves and speed of the runs that cells are about, the newest first."""
    runs = sorted(site.runs, key=lambda run: run[0].started, reverse=True)[:_MOST_RUNS]
    cells = {cell.cell: cell for stack in site.stacks for cell in stack.cells.values()}
    named = [(Link(receipt.cell, site.page_of(cells[receipt.cell])), receipt, record) for receipt, record in runs]
    blocks = describe_training(named)
    doubted = [receipt.cell for receipt, _ in runs if not cells[receipt.cell].holds]
    slow = [block for block in blocks if isinstance(block, Paragraph)]
    summary = f"{count(runs, 'training run')}: {len(doubted)} in a cell that does not hold"
    summary += f", {len(slow)} in low precision slower than bf16." if slow else "."
    mark = bad("does not hold") if doubted else risk("slower") if slow else good("holds")
    return Document("Loss and speed of training runs", summary, mark, blocks)


def describe_environments(site: Site) -> Document:
    """What each stack loaded, side by side; rows that differ first."""
    blocks: list[Block] = []
    for target in site.targets:
        if stacks := [key for key in site.environments if key[0] == target][:_MOST_STACKS]:
            rows = _compare_environments(site, stacks)
            same = tuple(row[:2] for row in rows if len(set(row[1:])) == 1)
            differing = tuple(row for row in rows if len(set(row[1:])) > 1)
            blocks += [Heading(f"On {target}"), Table(("fact", *(stack for _, stack in stacks)), differing)]
            blocks.append(Details(f"{count(same, 'fact')} the same in every stack", (Table(("fact", "value"), same),)))
    summary = "Packages, libraries and machines as the probes loaded them, a column a stack."
    return Document("Environments side by side", summary, quiet("facts"), tuple(blocks))


def describe_gates(site: Site) -> Document:
    """Every decision of the release gate that was given to the report."""
    blocks: list[Block] = []
    marks = [_mark_gate(document.mark, foreign=foreign) for _, document, foreign in site.gates]
    for (decision, document, foreign), mark in zip(site.gates, marks, strict=True):
        name = f"{decision.release} of {decision.stack} on {decision.target}"
        blocks += [Heading(name, mark=mark), Paragraph(document.summary)]
        if foreign:
            text = (
                "The decision was made of other receipts than these pages show. Run `release-gate` on these receipts."
            )
            blocks.append(Paragraph(text, risk("other receipts")))
        blocks += [replace(block, level=3) if isinstance(block, Heading) else block for block in document.blocks]
    words = [
        f"{gate.stack} on {gate.target}: {mark.word}" for (gate, _, _), mark in zip(site.gates, marks, strict=True)
    ]
    return Document("May it be released?", f"Release gate: {'; '.join(words)}.", _worst(marks), tuple(blocks))


def describe_files(site: Site) -> Document:
    """Files that are no receipts, and results of other verbs."""
    unreadable = tuple((f"`{file}`", why) for file, why in list(site.unreadable.items())[:_MOST_FILES])
    blocks: list[Block] = [Table(("file", "what is wrong"), unreadable, "Invalid receipts")] if unreadable else []
    if site.results:
        links = tuple((Link(file, page),) for page, file in site.results.items())
        blocks.append(Table(("result",), links, "Results of other verbs"))
    files = count(len(site.unreadable), "file")
    summary = f"{files} could not be read: their cells are lost." if unreadable else "Every receipt could be read."
    return Document("Files", summary, missing() if unreadable else good("read"), tuple(blocks))


def mark_step(step: StepResult) -> Mark:
    """How the step between two stacks looks."""
    if step.breaks:
        slow = all(culprit.is_slowdown for culprit in step.culprits)
        return risk("slower") if slow else bad("breaks")
    unseen = any(row.before is None and row.after is not None and row.after.is_good for row in step.modules)
    return missing("no evidence") if step.lost or unseen else good("breaks nothing")


def name_step(step: StepResult) -> str:
    """From which stack to which."""
    return f"{step.before} → {step.after} on {step.target}"


def link_step(step: StepResult) -> str:
    """Where a step is shown."""
    return f"steps.html#{make_anchor(name_step(step))}"


def _tabulate_grid(site: Site, stacks: Sequence[StackHistory], probes: Iterable[str], root: str) -> Table:
    columns = tuple(probes)
    rows: list[tuple[Content, ...]] = []
    for stack in stacks:
        cells = (stack.cells.get(probe) for probe in columns)
        links = (Link(cell.mark.word, f"{root}{site.page_of(cell)}", cell.mark) if cell else "" for cell in cells)
        rows.append((stack.stack, *links))
    return Table(("stack", *columns), tuple(rows))


def _tabulate_steps(steps: Sequence[StepResult]) -> Table:
    rows = tuple(
        (
            Link(name_step(step), link_step(step)),
            mark_step(step),
            "; ".join(map(name_culprit, step.culprits)) or "nothing",
            ", ".join(step.lost),
        )
        for step in steps
    )
    return Table(("step", "", "blamed", "no evidence on"), rows)


def _group_probes(stacks: Iterable[StackHistory], modules: Sequence[str]) -> dict[str, list[str]]:
    """Probes of some stacks by group: every module in dependency order, then what else was seen, by name."""
    groups: dict[str, list[str]] = {MODULES: list(modules)} | {name: [] for _, name in _GROUPS} | {_OTHERS: []}
    for probe in sorted({probe for stack in stacks for probe in stack.cells} - set(modules)):
        groups[next((name for start, name in _GROUPS if probe.startswith(start)), _OTHERS)].append(probe)
    return {name: probes for name, probes in groups.items() if probes}


def _count_good(stacks: Iterable[StackHistory], probes: Sequence[str]) -> str:
    numbers = []
    for stack in stacks:
        seen = [stack.cells[probe].holds for probe in probes if probe in stack.cells]
        if seen:
            numbers.append(f"{stack.stack} {sum(seen)} of {len(seen)}")
    return ", ".join(numbers[:_MOST_STACKS]) or "no receipt"


def _answer(site: Site) -> tuple[str, Mark]:
    """The first page's sentence. A decision of the gate can be of other receipts: it makes no page look better."""
    if not site.stacks:
        return "There is no receipt: nothing is known.", missing()
    answers = [_answer_target([s for s in site.stacks if s.target == target], site.modules) for target in site.targets]
    releases = [stack for stack in site.stacks if stack.stack != "native"]  # the reference is no release
    whole = sum(stack.holds(site.modules) for stack in releases)
    summary = f"{' '.join(text for text, _ in answers)} {whole} of {count(releases, 'release')} hold in every module."
    marks = [mark for _, mark in answers]
    if site.gates:
        gates = describe_gates(site)
        summary, marks = f"{gates.summary} {summary}", [*marks, gates.mark]
    if site.unreadable:
        summary += f" {count(len(site.unreadable), 'file')} could not be read."
        marks.append(missing())
    return summary, _worst(marks)


def _answer_target(stacks: Sequence[StackHistory], modules: Sequence[str]) -> tuple[str, Mark]:
    """What the newest stack with bridge modules shows."""
    newest = next((stack for stack in stacks if not stack.cells.keys().isdisjoint(modules)), stacks[0])
    name = f"{newest.stack} on {newest.target}"
    read = {module: newest.cells[module] for module in modules if module in newest.cells}
    read = {module: cell for module, cell in read.items() if not cell.lost}
    if red := [module for module, cell in read.items() if not cell.outcome.is_good]:
        return f"{name} does not hold in {', '.join(red)}.", bad("fails")
    if lacking := [module for module in modules if module not in read]:
        return f"{name} has no receipt of {', '.join(lacking)}.", missing()
    if doubts := [f"{module} ({cell.doubt})" for module, cell in read.items() if cell.doubt]:
        return f"{name} is in doubt in {', '.join(doubts)}.", risk("in doubt")
    return f"{name} holds in every bridge module.", good("holds")


def _compare_environments(site: Site, stacks: Sequence[tuple[str, str]]) -> list[tuple[str, ...]]:
    """A row a fact: its name, and its values in each (target, stack)."""
    facts = [site.environments.get(key, {}) for key in stacks]
    names = dict.fromkeys(name for each in facts for name in each)
    return [(name, *(" | ".join(sorted(each.get(name, ()))) for each in facts)) for name in names]


def _mark_gate(mark: Mark, *, foreign: bool) -> Mark:
    word = f"{mark.word}, of other receipts" if foreign else mark.word
    return risk(word) if foreign and mark.tone is Tone.GOOD else replace(mark, word=word)


def _worst(marks: Sequence[Mark]) -> Mark:
    order = (Tone.BAD, Tone.MISSING, Tone.RISK, Tone.QUIET, Tone.GOOD)
    return min(marks, key=lambda mark: order.index(mark.tone))
