"""The pages about many cells: overview, target, steps, gate, training, environments and files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megacpp_validate.evidence.receipt import Receipt, TrainingRecord
from megacpp_validate.text import count

from ...canary.dynamic.upgrade_result import StepResult
from ...gate.release import GateDecision
from ..describe.gate import describe_gate
from ..describe.training import describe_training
from ..describe.upgrade import describe_step, mark_step, name_culprit, summarize_step
from ..document import Block, Content, Details, Document, Heading, Link, Paragraph, Table
from ..marks import Mark, Tone, find_worst_mark, good, missing, quiet, risk
from ..render.html import make_anchor
from .cells import MOST_STACKS, CellHistory, Grid, name_page

_NOT_THERE = missing("no receipt")


@dataclass
class Site:
    """What the pages show.

    Attributes:
        modules: ids of the bridge modules, in dependency order.
        facts: (target, stack) -> fact of the environment -> its values.
        runs: the training run that each cell is about.
        gates: decisions of the release gate.
        unreadable: file of an invalid receipt -> reason.
    """

    store: str
    made_at: str
    modules: tuple[str, ...]
    grid: Grid
    gates: tuple[GateDecision, ...] = ()
    unreadable: dict[str, str] = field(default_factory=dict)
    steps: list[StepResult] = field(default_factory=list)
    facts: dict[tuple[str, str], dict[str, set[str]]] = field(default_factory=dict)
    runs: list[tuple[Receipt, TrainingRecord]] = field(default_factory=list)

    @property
    def targets(self) -> list[str]:
        """Every target with a cell."""
        return list(dict.fromkeys(target for target, _ in self.grid))

    @property
    def cells(self) -> list[CellHistory]:
        """Every cell."""
        return [cell for cells in self.grid.values() for cell in cells.values()]

    def select(self, target: str, probes: Iterable[str]) -> dict[str, dict[str, CellHistory]]:
        """Stack -> cells, of stacks of one target that have a cell of one of these probes."""
        kept = set(probes)
        return {stack: cells for (of, stack), cells in self.grid.items() if of == target and kept & cells.keys()}


def describe_pages(site: Site) -> dict[str, Document]:
    """Path -> page; a page without content is left out."""
    pages = {name_page("target", target): describe_target(site, target) for target in site.targets}
    pages |= {"index.html": describe_overview(site), "steps.html": describe_steps(site)}
    pages |= {"gate.html": describe_gates(site), "training.html": describe_runs(site)}
    pages |= {"environments.html": describe_environments(site), "files.html": describe_files(site)}
    return {path: page for path, page in pages.items() if page.blocks or path == "files.html"}


def describe_overview(site: Site) -> Document:
    """The answer, the modules of the newest releases, and what is to blame."""
    answers = [_answer(site, target) for target in site.targets]
    releases = [cells for (_, stack), cells in site.grid.items() if stack != "native"]  # the reference is no release
    whole = sum(all(_mark(cells, module).tone is Tone.GOOD for module in site.modules) for cells in releases)
    gates = [describe_gate(decision) for decision in site.gates]
    marks = [*(mark for _, mark in answers), *(gate.mark for gate in gates), *([missing()] if site.unreadable else [])]
    blocks: list[Block] = [Paragraph(f"{gate.title}: {gate.summary}", gate.mark) for gate in gates]
    for target in site.targets:
        stacks = dict(list(site.select(target, site.modules).items())[:MOST_STACKS])
        held = sum(cell.holds for cell in site.cells if cell.target == target)
        number = sum(cell.target == target for cell in site.cells)
        blocks += [
            Heading(f"On {target}"),
            _tabulate_grid(stacks, site.modules),
            Table(
                ("cells", "hold"),
                ((Link(f"Every cell on {target}", name_page("target", target)), f"{held} of {number}"),),
            ),
        ]
    blocks += [Heading("What releases broke"), _tabulate_steps(site.steps[:MOST_STACKS])]
    lost = f"{count(site.unreadable, 'file')} could not be read." if site.unreadable else ""
    blocks += [Paragraph(lost, missing()), Paragraph(f"Receipts: `{site.store}`; made {site.made_at}.")]
    summary = f"{' '.join(text for text, _ in answers)} {whole} of {count(releases, 'release')} hold in every module."
    title = "Does the bridge to Transformer Engine hold?"
    return Document(title, summary, find_worst_mark(marks, missing()), tuple(blocks))


def describe_target(site: Site, target: str) -> Document:
    """Every cell on one target: the modules, then FP8, training and the rest."""
    others = sorted({cell.probe for cell in site.cells if cell.target == target} - set(site.modules))
    groups: dict[str, list[str]] = {"Bridge modules": list(site.modules), "FP8": [], "Training smoke": [], "Others": []}
    for probe in others:
        group = "FP8" if probe.startswith("fp8_") else "Training smoke" if probe.startswith("smoke_") else "Others"
        groups[group].append(probe)
    blocks: list[Block] = []
    for name, probes in groups.items():
        blocks += [Heading(name), _tabulate_grid(site.select(target, probes), probes, "../")]
    return Document(f"Every cell on {target}", *_answer(site, target), tuple(blocks))


def describe_steps(site: Site) -> Document:
    """Every step between adjacent releases."""
    blocks: list[Block] = [_tabulate_steps(site.steps)]
    for step in site.steps:
        blocks += [
            Heading(name_step(step), mark=mark_step(step)),
            Paragraph(summarize_step(step)),
            *describe_step(step),
        ]
        compared = _compare_facts(site, [(step.target, step.before), (step.target, step.after)])
        differing = tuple(row for row in compared if row[1] and row[2] and row[1] != row[2])
        table = Table(("fact", step.before, step.after), differing)
        blocks.append(Details(f"{count(differing, 'other fact')} of the environments differ", (table,)))
    breaking = sum(step.breaks for step in site.steps)
    return Document(
        "What releases broke",
        f"Steps that break something: {breaking} of {len(site.steps)}.",
        find_worst_mark(map(mark_step, site.steps), quiet("no step")),
        tuple(blocks),
    )


def describe_runs(site: Site) -> Document:
    """Loss curves and speed of the runs that cells are about, the newest first."""
    cells = {cell.cell: cell for cell in site.cells}
    runs = sorted(site.runs, key=lambda run: run[0].started, reverse=True)
    blocks = describe_training(
        (Link(receipt.cell, cells[receipt.cell].page), receipt, record) for receipt, record in runs
    )
    marks = [cells[receipt.cell].mark for receipt, _ in runs]
    marks += [block.mark for block in blocks if isinstance(block, Paragraph) and block.mark]
    doubted = sum(not cells[receipt.cell].holds for receipt, _ in runs)
    summary = f"{count(runs, 'training run')}: {doubted} in a cell that does not hold."
    return Document("Loss and speed of training runs", summary, find_worst_mark(marks, quiet("no run")), blocks)


def describe_environments(site: Site) -> Document:
    """What each stack loaded, side by side; rows that differ first."""
    blocks: list[Block] = []
    for target in site.targets:
        stacks = [key for key in site.facts if key[0] == target][:MOST_STACKS]
        rows = _compare_facts(site, stacks)
        same = tuple(row[:2] for row in rows if len(set(row[1:])) == 1)
        differing = tuple(row for row in rows if len(set(row[1:])) > 1)
        blocks += [Heading(f"On {target}"), Table(("fact", *(stack for _, stack in stacks)), differing)]
        blocks.append(Details(f"{count(same, 'fact')} the same in every stack", (Table(("fact", "value"), same),)))
    summary = "Packages, libraries and machines as the probes loaded them, a column a stack."
    return Document("Environments side by side", summary, quiet("facts"), tuple(blocks))


def describe_gates(site: Site) -> Document:
    """Every decision of the release gate that was given to the report; each names the hash of its receipts."""
    documents = [describe_gate(decision) for decision in site.gates]
    blocks: list[Block] = []
    for one in documents:
        blocks += [Heading(one.title, mark=one.mark), Paragraph(one.summary)]
        blocks += [Heading(block.text, 3, block.mark) if isinstance(block, Heading) else block for block in one.blocks]
    summary = "; ".join(f"{one.title}: {one.mark.word}" for one in documents)
    marks = (one.mark for one in documents)
    return Document("May it be released?", f"{summary}.", find_worst_mark(marks, quiet("none")), tuple(blocks))


def describe_files(site: Site) -> Document:
    """Files that are invalid receipts."""
    rows = tuple((f"`{file}`", why) for file, why in site.unreadable.items())
    summary = f"{count(rows, 'file')} could not be read: their cells are lost." if rows else "Every receipt is valid."
    mark = missing() if rows else good("read")
    return Document("Files", summary, mark, (Table(("file", "reason"), rows, "Invalid receipts"),))


def name_step(step: StepResult) -> str:
    """From which stack to which."""
    return f"{step.before} → {step.after} on {step.target}"


def link_step(step: StepResult) -> str:
    """Where a step is shown."""
    return f"steps.html#{make_anchor(name_step(step))}"


def _mark(cells: dict[str, CellHistory], probe: str) -> Mark:
    return cells[probe].mark if probe in cells else _NOT_THERE


def _tabulate_grid(stacks: dict[str, dict[str, CellHistory]], probes: Iterable[str], root: str = "") -> Table:
    columns = tuple(probes)
    rows: list[tuple[Content, ...]] = []
    for stack, cells in stacks.items():
        links = (
            Link(cells[probe].mark.word, f"{root}{cells[probe].page}", cells[probe].mark) if probe in cells else ""
            for probe in columns
        )
        rows.append((stack, *links))
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


def _answer(site: Site, target: str) -> tuple[str, Mark]:
    """What the newest stack with bridge modules shows. A decision of the gate makes no page look better."""
    stacks = site.select(target, site.modules)
    if not stacks:
        return f"No stack on {target} has a receipt of a bridge module.", _NOT_THERE
    stack, cells = next(iter(stacks.items()))
    marks = {module: _mark(cells, module) for module in site.modules}
    wrong = [f"{module} ({mark.word})" for module, mark in marks.items() if mark.tone not in (Tone.GOOD, Tone.QUIET)]
    if not wrong:
        return f"{stack} on {target} holds in every bridge module.", good("holds")
    return f"{stack} on {target} does not hold: {', '.join(wrong)}.", find_worst_mark(marks.values(), risk(""))


def _compare_facts(site: Site, stacks: Sequence[tuple[str, str]]) -> list[tuple[str, ...]]:
    """A row a fact: its name, and its values in each (target, stack)."""
    facts = [site.facts.get(key, {}) for key in stacks]
    names = dict.fromkeys(name for each in facts for name in each)
    return [(name, *(" | ".join(sorted(each.get(name, ()))) for each in facts)) for name in names]
