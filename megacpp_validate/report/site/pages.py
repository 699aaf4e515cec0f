"""The pages of a report site, one function a page: values in, HTML out. Nothing is read and nothing is written here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from megacpp_validate.evidence.receipt import Outcome, Receipt

from ...canary.dynamic.upgrade_result import StepResult
from ..html.pages import render_page
from ..marks import mark_cell
from ..summaries import count
from ..words.gate import mark_cell_verdict, mark_gate_waiver, name_culprit, say_why, summarize_gate
from ..words.score import say_counts, say_day, say_interval, say_share
from ..words.selftest import find_unsettled, say_unsettled, score_modules
from ..words.smoke import HEADINGS
from .cell_page import TrainedRun, cell_values, number, shorten
from .environments import MOST_RECEIPTS, Environment, merge_facts, pack_environments, pair_facts
from .gate_words import find_others, identity_of, mark_shown_gate
from .marks import (
    AHEAD,
    CONTRADICTED,
    COPIED,
    FILE_LOST,
    NOT_READ,
    OUTDATED,
    SECOND_COPY,
    mark_backend,
    mark_fate,
    mark_history,
    mark_score,
    mark_step,
    mark_timing,
    mark_trend,
)
from .paths import result_page, step_page, target_page
from .score_words import falls_short, find_left_out, say_partly
from .trends import Trend, draw_trend, find_trends, say_trend
from .values import MODULES, CellHistory, Depth, SiteFacts, StackHistory, group_probes

NAV: Final = (
    ("index.html", "Overview"),
    ("steps.html", "Blame"),
    ("gate.html", "Release gate"),
    ("training.html", "Training"),
    ("trends.html", "Trends"),
    ("environments.html", "Environments"),
    ("score.html", "The suite's score"),
    ("files.html", "Files"),
)
MOST_TRAINED: Final = 40  # runs that are drawn on the page of all training, the newest
_MOST_CELLS: Final = 900  # of grids on the first page, at about 130 bytes each: with 300 kB for the page, half
_MOST_TARGETS: Final = 8
_MOST_ANSWERS: Final = 4  # targets that the answer names
_MOST_ROWS: Final = 20
_MOST_CLOSING: Final = 12
_MOST_TRENDS: Final = 24
_MOST_FILES: Final = 500
_MOST_VERDICTS: Final = 400
_LEGEND: Final = tuple(mark_cell(outcome) for outcome in Outcome)


def render_cell(
    facts: SiteFacts,
    history: CellHistory,
    receipt: Receipt | None,
    trained: tuple[TrainedRun, ...] = (),
    missing: str = "",
) -> str:
    """The page of a cell; see `cell_values`. `missing` says what is wrong with its newest receipt."""
    return _render("cell", facts, root="../", missing=missing, **cell_values(history, receipt, trained))


def render_index(facts: SiteFacts, steps: Sequence[StepResult]) -> str:
    """The first page: answer, gate, grids of the newest releases, blame, score. Never longer for more receipts."""
    targets = facts.targets
    shown = targets[:_MOST_TARGETS]
    most = max(_MOST_CELLS // max(len(shown) * len(facts.modules), 1), 3)
    said, tone = _answer(facts)
    return _render(
        "index",
        facts,
        here="index.html",
        said=said,
        tone=tone,
        targets=[_target_values(target, facts, most) for target in shown],
        targets_left=[{"name": target, "page": target_page(target)} for target in targets[_MOST_TARGETS:][:_MOST_ROWS]],
        steps=steps,
        most_rows=_MOST_ROWS,
        most_closing=_MOST_CLOSING,
    )


def render_target(facts: SiteFacts, target: str) -> str:
    """Every cell on one target, in grids of modules, FP8, training and the rest."""
    stacks = [stack for stack in facts.stacks if stack.target == target]
    said, tone = _say_stacks(stacks, facts.modules)
    groups = group_probes(stacks, facts.modules)
    return _render("target", facts, root="../", name=target, stacks=stacks, groups=groups, said=said, tone=tone)


def render_stack(facts: SiteFacts, stack: StackHistory) -> str:
    """Every cell of an older stack, by its history alone."""
    said, tone = _say_stacks([stack], facts.modules)
    return _render("stack", facts, root="../", stack=stack, said=said, tone=tone)


def render_step(facts: SiteFacts, step: StepResult, before: Sequence[Environment], after: Sequence[Environment]) -> str:
    """Blame of one step, and what else changed between the environments of its sides."""
    pairs = pair_facts(merge_facts(before), merge_facts(after))
    differing = [pair for pair in pairs if pair.differs]
    return _render("step", facts, root="../", step=step, pairs=differing, same=len(pairs) - len(differing))


def render_steps(facts: SiteFacts, steps: Sequence[StepResult]) -> str:
    """Every step in a row."""
    breaking = sum(step.breaks for step in steps)
    lost = any(step.lost for step in steps)
    verb = "breaks" if len(steps) == 1 else "break"
    said = f"{breaking} of {count(len(steps), 'step')} {verb} something." if steps else "There is no step to judge."
    left = sum(depth is Depth.LISTED for depth in facts.depths.values())
    said += f" {count(left, 'older stack')} left out." if left else ""
    tone = "bad" if breaking else "risk" if lost or not steps else "good"
    return _render("steps", facts, here="steps.html", steps=steps, said=said, tone=tone)


def render_training(facts: SiteFacts, trained: Sequence[TrainedRun]) -> str:
    """Loss curves and goodput of the runs that cells are about, the newest first."""
    runs = sorted(trained, key=lambda run: run.started, reverse=True)
    tones = [run.mark.tone for run in runs]
    doubted = sum(tone in ("bad", "risk") for tone in tones)
    said = f"{count(len(runs), 'training run')}, {doubted} of them in a cell that is not good or in doubt."
    return _render(
        "training",
        facts,
        here="training.html",
        trained=runs[:MOST_TRAINED],
        left=max(len(runs) - MOST_TRAINED, 0),
        headings=HEADINGS[1:],
        said=said if runs else "Nobody trained.",
        tone=_worst(["good", *tones]) if runs else "risk",
    )


def render_trends(facts: SiteFacts) -> str:
    """What cells cost over runs, the largest growth first."""
    found: list[tuple[CellHistory, Trend]] = [
        (cell, trend) for stack in facts.stacks for cell in stack.cells.values() for trend in find_trends(cell)
    ]
    found.sort(key=lambda pair: -pair[1].ratio)
    more = sum(mark_trend(trend).tone == "risk" for _, trend in found)
    said = f"{more} of {count(len(found), 'trend')} took more than 1.1 times the median of earlier runs."
    return _render(
        "trends",
        facts,
        here="trends.html",
        shown=found[:_MOST_TRENDS],
        left=max(len(found) - _MOST_TRENDS, 0),
        said=said if found else "No cell has two good receipts with a date yet.",
        tone="risk" if more or not found else "good",
    )


def render_environments(
    facts: SiteFacts,
    environments: Sequence[Environment],
    pairs: Sequence[tuple[Sequence[Environment], Sequence[Environment]]],
) -> str:
    """Environments of two receipts side by side.

    Args:
        facts: of the site.
        environments: to choose from.
        pairs: environments of adjacent releases, older and newer.
    """
    shown = environments[:MOST_RECEIPTS]
    groups: dict[str, list[tuple[int, Environment]]] = {}
    for index, each in enumerate(shown):
        groups.setdefault(f"{each.stack} on {each.target}", []).append((index, each))
    first = next((index for index, each in enumerate(shown) if pairs and each == pairs[0][1][0]), 0)
    other = next(
        (index for index, each in enumerate(shown) if pairs and _is_beside(each, pairs[0])), min(1, len(shown))
    )
    adjacent = []
    for before, after in pairs:
        facts_of_both = pair_facts(merge_facts(before), merge_facts(after))
        differing = [pair for pair in facts_of_both if pair.differs]
        names = {"before": before[0].stack, "after": after[0].stack, "target": after[0].target}
        adjacent.append(names | {"differing": differing, "same": len(facts_of_both) - len(differing)})
    return _render(
        "environments",
        facts,
        here="environments.html",
        groups=list(groups.items()),
        packed=pack_environments(shown),
        before=other,
        after=first,
        pairs=adjacent,
        left=max(len(environments) - MOST_RECEIPTS, 0),
    )


def render_score(facts: SiteFacts) -> str:
    """Kill tables of the suite's own score."""
    scores = list(facts.scores.values())
    newest = scores[:1]
    short = bool(newest) and falls_short(facts.rates)
    if short or any(find_unsettled(score) or score.false_alarms or score.lost for score in newest):
        said, tone = "The selftest did not find everything, or blamed another module for it.", "bad"
    elif newest and (partly := say_partly(newest[0], facts.mutants)):
        said, tone = f"The newest selftest is {partly}: what the others would show is not known.", "risk"
    elif newest:
        said, tone = "The selftest found every planted fault, and blamed its own module for it.", "good"
    else:
        said, tone = "There is no kill table.", "risk"
    return _render("score", facts, here="score.html", said=said, tone=tone)


def render_gate(facts: SiteFacts) -> str:
    """Every decision of the release gate, with the reason of each cell."""
    said, tone = _say_gates(facts) if facts.gates else ("No decision was given to this report.", "risk")
    known = {
        cell.newest.cell: facts.page_of(stack.target, stack.stack, cell.newest.cell)
        for stack in facts.stacks
        for cell in stack.cells.values()
    }
    return _render("gate", facts, here="gate.html", said=said, tone=tone, known=known, most_rows=_MOST_VERDICTS)


def render_files(facts: SiteFacts) -> str:
    """Files of the store that are no receipts."""
    unreadable = list(facts.unreadable.items())
    said = (
        f"{count(len(unreadable), 'file')} could not be read: their cells are lost."
        if unreadable
        else "Every file that says that it is a receipt could be read."
    )
    return _render(
        "files", facts, here="files.html", said=said, tone="risk" if unreadable else "good",
        unreadable=unreadable[:_MOST_FILES], left=max(len(unreadable) - _MOST_FILES, 0),
    )  # fmt: skip


def render_assets() -> list[tuple[str, str]]:
    """What every page of the site shares."""
    return [("site.css", render_page("site/style.css.j2")), ("site.js", render_page("site/script.js.j2"))]


def _render(page: str, facts: SiteFacts, *, root: str = "", here: str = "", **values: Any) -> str:
    return render_page(f"site/{page}.html.j2", facts=facts, root=root, here=here, nav=NAV, **_WORDS | values)


def _answer(facts: SiteFacts) -> tuple[str, str]:
    """The first page's sentence: the gate's where it decided, else what the newest receipts show."""
    said, tone = _say_stacks(facts.stacks, facts.modules)
    if facts.gates:
        # A decision can be of other receipts, or of other rules: it never makes the page look better than they do.
        decided, of_gate = _say_gates(facts)
        said = decided if tone == "good" else f"{decided} {said}"
        tone = _worst((tone, of_gate))
    if facts.unreadable:
        said += f" {count(len(facts.unreadable), 'file')} could not be read."
        tone = "risk" if tone == "good" else tone
    return said, tone


def _say_gates(facts: SiteFacts) -> tuple[str, str]:
    marks = [(gate, mark_shown_gate(gate, facts.foreign_gates)) for gate in facts.gates]
    told = [f"{gate.stack} on {gate.target}: {mark.word}" for gate, mark in marks]
    return f"Release gate: {'; '.join(told)}.", _worst(mark.tone for _, mark in marks)


def _worst(tones: Iterable[str]) -> str:
    seen = set(tones)
    return next(tone for tone in ("bad", "risk", "good") if tone in seen)


def _say_stacks(stacks: Sequence[StackHistory], modules: Sequence[str]) -> tuple[str, str]:
    """What the newest stack of each target shows, and how many hold of all."""
    if not stacks:
        return "There is no receipt: nothing is known.", "risk"
    targets = list(dict.fromkeys(stack.target for stack in stacks))
    answers = [_say_newest([stack for stack in stacks if stack.target == target], modules) for target in targets]
    told = [said for said, _ in answers[:_MOST_ANSWERS]]
    left = [f"{count(len(answers) - _MOST_ANSWERS, 'other target')} below"] if answers[_MOST_ANSWERS:] else []
    whole = sum(_holds(stack, modules) for stack in stacks)
    verb = "holds" if len(stacks) == 1 else "hold"
    said = f"{'; '.join([*told, *left])}. {whole} of {count(len(stacks), 'stack')} {verb}."
    return said, _worst(tone for _, tone in answers)


def _say_newest(stacks: Sequence[StackHistory], modules: Sequence[str]) -> tuple[str, str]:
    newest = next((stack for stack in stacks if not stack.cells.keys().isdisjoint(modules)), stacks[0])
    name = f"{newest.stack} on {newest.target}"
    read = {module: cell for module, cell in newest.cells.items() if module in modules and not cell.newest.lost}
    red = [module for module in modules if module in read and not read[module].newest.outcome.is_good]
    if red:
        return f"{name} does not hold in {', '.join(red)}", "bad"
    if lacking := [module for module in modules if module not in read]:
        return f"{name} has no receipt of {', '.join(lacking)}", "risk"
    if doubts := [f"{module} ({read[module].doubt})" for module in modules if read[module].doubt]:
        return f"{name} is in doubt in {', '.join(doubts)}", "risk"
    return f"{name} holds in every bridge module", "good"


def _holds(stack: StackHistory, modules: Iterable[str]) -> bool:
    return all(module in stack.cells and stack.cells[module].holds for module in modules)


def _target_values(target: str, facts: SiteFacts, most: int) -> dict[str, Any]:
    """One target of the first page: as many of its newest stacks as there is room for."""
    stacks = [stack for stack in facts.stacks if stack.target == target]
    with_modules = _rows_of(stacks, facts.modules)
    groups = []
    for name, probes in group_probes(stacks, facts.modules).items():
        if name != MODULES:
            rows = [_count_good(stack, probes) for stack in _rows_of(stacks, probes)]
            groups.append({"name": name, "rows": rows[:_MOST_ROWS]})
    return {
        "name": target,
        "page": target_page(target),
        "shown": with_modules[:most],
        "left": max(len(with_modules) - most, 0),
        "modules": facts.modules,
        "groups": groups,
    }


def _is_beside(each: Environment, pair: tuple[Sequence[Environment], Sequence[Environment]]) -> bool:
    """Whether an environment is that of the older release, seen by the probe that stands first in the newer one."""
    older, newer = pair
    return each in older and each.probe == newer[0].probe


def _rows_of(stacks: Sequence[StackHistory], probes: Sequence[str]) -> list[StackHistory]:
    return [stack for stack in stacks if not stack.cells.keys().isdisjoint(probes)]


def _count_good(stack: StackHistory, probes: Sequence[str]) -> Mapping[str, Any]:
    seen = [stack.cells[probe].holds for probe in probes if probe in stack.cells]
    return {"stack": stack.stack, "good": sum(seen), "all": len(seen)}


_WORDS: Final[dict[str, Any]] = {
    "ahead": AHEAD,
    "contradicted": CONTRADICTED,
    "copied": COPIED,
    "draw_trend": draw_trend,
    "file_lost": FILE_LOST,
    "backend_mark": mark_backend,
    "identity_of": identity_of,
    "legend_marks": _LEGEND,
    "mark_cell_verdict": mark_cell_verdict,
    "mark_fate": mark_fate,
    "mark_gate_waiver": mark_gate_waiver,
    "mark_history": mark_history,
    "mark_score": mark_score,
    "mark_shown_gate": mark_shown_gate,
    "mark_step": mark_step,
    "mark_timing": mark_timing,
    "mark_trend": mark_trend,
    "name_culprit": name_culprit,
    "not_read": NOT_READ,
    "number": number,
    "others": find_others,
    "outdated": OUTDATED,
    "result_page": result_page,
    "rows_of": _rows_of,
    "say_counts": say_counts,
    "say_day": say_day,
    "say_interval": say_interval,
    "say_partly": say_partly,
    "say_share": say_share,
    "say_trend": say_trend,
    "say_unsettled": say_unsettled,
    "say_why": say_why,
    "score_modules": score_modules,
    "find_left_out": find_left_out,
    "find_unsettled": find_unsettled,
    "second_copy": SECOND_COPY,
    "shorten": shorten,
    "step_page": step_page,
    "summarize_gate": summarize_gate,
    "target_page": target_page,
}
