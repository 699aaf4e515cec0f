"""A search for the first bad release in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from megacpp_validate.text import count, first_sentence

from ...canary.dynamic.search import Answer, BisectResult, SearchEnd, Turn, Verdict
from ..document import Bullets, Content, Diagnostic, Document, Paragraph, Table
from ..marks import bad, good, missing, risk

_NAMES: Final = {
    "te": "Transformer Engine", "cudnn": "cuDNN", "cublas": "cuBLAS", "cudart": "the CUDA runtime", "nccl": "NCCL",
    "triton": "Triton", "deep-gemm": "DeepGEMM",
}  # fmt: skip
_MARKS: Final = {
    Verdict.GOOD: good("good"), Verdict.BAD: bad("bad"), Verdict.CANNOT_BUILD: missing("cannot build"),
    Verdict.CANNOT_TELL: missing("cannot tell"),
}  # fmt: skip
_ENDS: Final = {
    SearchEnd.GOOD_IS_BAD: "The good end is bad already: {module} fails with {good}: {why}.",
    SearchEnd.BAD_IS_GOOD: "The bad end is good: {module} holds with {bad}.",
    SearchEnd.END_UNTOLD: "The {end} end cannot be judged: {why}.",
    SearchEnd.END_UNBUILT: "The {end} end cannot be built: {why}.",
}
_NEXT: Final = {
    SearchEnd.NARROWED: "make one of the points usable that give no answer, and start again: answers are kept",
    SearchEnd.GOOD_IS_BAD: "name an older good end, one that was seen to be good",
    SearchEnd.BAD_IS_GOOD: "search by `--tier gpu`, which runs the module, or give what else differs as --axis",
    SearchEnd.END_UNTOLD: "choose the nearest release that can be judged",
    SearchEnd.END_UNBUILT: "choose the nearest release that can be built",
}


def describe_run(choices: Mapping[str, str], answer: Answer, known: bool) -> str:
    """One run of a search in a line."""
    reason = "" if answer.verdict is Verdict.GOOD else f": {first_sentence(answer.reason)}"
    return f"{_MARKS[answer.verdict].word:12} {_join(choices)}{' (known)' if known else ''}{reason}"


def describe_bisect(result: BisectResult) -> Document:
    """The answer, every point that was tried, and what speaks against the answer."""
    moving = [number for number, axis in enumerate(result.axes) if len(axis.values) > 1]
    rows: tuple[tuple[Content, ...], ...] = tuple(
        (
            *(point.choices[number] for number in moving),
            _MARKS[point.verdict],
            f"{point.good} good, {point.bad} bad" if point.good and point.bad else str(point.good + point.bad),
            first_sentence(point.reason),
        )
        for point in result.points
    )
    columns = (*(_name(result.axes[number].name) for number in moving), "verdict", "runs", "why")
    details = tuple(line for culprit in result.culprits for turn in culprit.turns for line in _list_turn(turn))
    reused = sum(point.reused for point in result.points)
    cost = f"{count(result.environments, 'environment')}, {count(result.runs, 'run')}, {reused} of them from earlier; "
    cost += f"{result.seconds:.0f} s. The search takes it that what is bad stays bad in later releases."
    if result.flaky:
        cost += (
            f" Probability that the answer is right: {result.confidence:.4f} (a run is wrong with {result.flaky:g})."
        )
    step, summary = _find_next_step(result), f"{_summarize(result)} Judged by the {result.tier} tier."
    blocks = (Table(columns, rows), *((Bullets(details),) if details else ()), Paragraph(cost))
    mark = bad("found") if result.end is SearchEnd.FOUND else risk(result.end.value.replace("-", " "))
    case = Diagnostic(result.module, mark, "te_bisect", summary, help=step, seconds=result.seconds)
    if result.end in (SearchEnd.END_UNTOLD, SearchEnd.END_UNBUILT):
        mark = missing("no answer")
    title = f"First bad release for {result.module}"
    return Document(title, summary, mark, (*blocks, Paragraph(f"Next step: {step}.")), (case,))


def _summarize(result: BisectResult) -> str:
    if result.end in _ENDS:
        good_end, bad_end = (_join({axis.name: axis.values[at] for axis in result.axes}) for at in (0, -1))
        why = first_sentence(result.points[-1].reason).rstrip("., ") if result.points else "unknown"
        end = "good" if len(result.points) < 2 else "bad"
        return _ENDS[result.end].format(module=result.module, good=good_end, bad=bad_end, why=why, end=end)
    parts = []
    if sum(len(axis.values) > 1 for axis in result.axes) > 1:
        each = "; and alone ".join(
            (" together with " if one.is_minimal else " or ").join(map(_name, one.axes))
            + ("" if one.is_minimal else " (one or more of them; points without one gave no answer)")
            for one in result.culprits
        )
        parts.append(f"Not Transformer Engine: {each}." if "te" in result.innocent else f"The cause is {each}.")
    for turn in (turn for one in result.culprits for turn in one.turns):
        start = f"{turn.last_good} is the last good one" if turn.last_good else "no value was seen to be good"
        which = "" if turn.is_closed else " (one of these)"
        parts.append(f"{result.module} breaks first with {_name(turn.axis)} {_list(turn.first_bad)}{which}; {start}.")
    return " ".join(parts)


def _list_turn(turn: Turn) -> Iterator[str]:
    name = _name(turn.axis)
    held = f" (with {_join(turn.held)})" if turn.held else ""
    which = "" if turn.is_closed else ", one of these"
    yield f"{name}: last good {turn.last_good or 'unknown'}, first bad {_list(turn.first_bad)}{which}{held}"
    for value, reason in turn.untold.items():
        yield f"{name} {value} gives no answer: {first_sentence(reason)}"
    if turn.absent:
        yield f"{name} {_list(turn.absent)}: this host has no environment for it"
    if turn.untried:
        yield f"{name} {_list(turn.untried)}: not tried, because too many around gave no answer (--patience)"


def _find_next_step(result: BisectResult) -> str:
    if result.end in _NEXT:
        return _NEXT[result.end]
    turn = result.culprits[0].turns[0]
    step = f"; `nox -s te_canary -- {turn.last_good} {turn.first_bad[0]}` shows what changed in that step"
    return f"stay on {_name(turn.axis)} {turn.last_good}{step if turn.axis == 'te' else ''}"


def _name(axis: str) -> str:
    return _NAMES.get(axis, axis)


def _join(choices: Mapping[str, str]) -> str:
    return " and ".join(f"{_name(name)} {value}" for name, value in choices.items())


def _list(values: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(values[:-1]), values[-1])))
