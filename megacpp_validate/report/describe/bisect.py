"""A search for the first bad release in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from megacpp_validate.text import count, first_sentence

from ...canary.dynamic.search import Answer, AxisCulprit, BisectResult, SearchEnd, Turn, Verdict
from ..document import Block, Bullets, Content, Diagnostic, Document, Mark, Paragraph, Table, bad, good, missing, risk

_NAMES: Final = {
    "te": "Transformer Engine", "cudnn": "cuDNN", "cublas": "cuBLAS", "cudart": "the CUDA runtime", "nccl": "NCCL",
    "triton": "Triton", "deep-gemm": "DeepGEMM",
}  # fmt: skip
_MARKS: Final = {
    Verdict.GOOD: good("good"), Verdict.BAD: bad("bad"), Verdict.CANNOT_BUILD: missing("cannot build"),
    Verdict.CANNOT_TELL: missing("cannot tell"),
}  # fmt: skip
_MOST_LISTED: Final = 6


def describe_run(choices: Mapping[str, str], answer: Answer, known: bool) -> str:
    """One run of a search in a line."""
    reason = "" if answer.verdict is Verdict.GOOD else f": {first_sentence(answer.reason)}"
    return f"{_MARKS[answer.verdict].word:12} {_say_choices(choices)}{' (known)' if known else ''}{reason}"


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
    turns = tuple(turn for culprit in result.culprits for turn in culprit.turns)
    details = [line for turn in turns for line in _say_turn(turn, alone=len(moving) == 1)]
    details += [
        f"Which of {_join([_name(name) for name in one.axes])} it takes is unknown: points without one do not answer."
        for one in result.culprits
        if not one.is_minimal
    ]
    reused = sum(point.reused for point in result.points)
    cost = f"{count(result.environments, 'environment')}, {count(result.runs, 'run')}, {reused} of them from earlier; "
    cost += f"{result.seconds:.0f} s. The search takes it that what is bad stays bad in later releases."
    if result.flaky:
        cost += (
            f" Probability that the answer is right: {result.confidence:.4f} (a run is wrong with {result.flaky:g})."
        )
    blocks: tuple[Block, ...] = (
        Table(columns, rows),
        *((Bullets(tuple(details)),) if details else ()),
        Paragraph(cost),
        Paragraph(f"Next step: {_say_next(result)}."),
    )
    summary = f"{_say_end(result)} Judged by the {result.tier} tier."
    mark = bad("found") if result.end is SearchEnd.FOUND else risk(result.end.value.replace("-", " "))
    case = Diagnostic(
        name=result.module,
        mark=mark,
        group="te_bisect",
        message=summary,
        help=_say_next(result),
        seconds=result.seconds,
    )
    return Document(f"First bad release for {result.module}", summary, _mark(result, mark), blocks, (case,))


def _mark(result: BisectResult, mark: Mark) -> Mark:
    return missing("no answer") if result.end in (SearchEnd.END_UNTOLD, SearchEnd.END_UNBUILT) else mark


def _say_end(result: BisectResult) -> str:
    ends = [_say_choices({axis.name: axis.values[at] for axis in result.axes}) for at in (0, -1)]
    why = first_sentence(result.points[-1].reason).rstrip("., ") if result.points else ""
    match result.end:
        case SearchEnd.FOUND | SearchEnd.NARROWED:
            return _say_found(result)
        case SearchEnd.GOOD_IS_BAD:
            return f"The good end is bad already: {result.module} fails with {ends[0]}: {why}."
        case SearchEnd.BAD_IS_GOOD:
            return f"The bad end is good: {result.module} holds with {ends[1]}."
        case _:
            at = min(len(result.points), 2) - 1
            verb = "built" if result.end is SearchEnd.END_UNBUILT else "judged"
            return f"The {('good', 'bad')[at]} end cannot be {verb}: {ends[at]}: {why}."


def _say_found(result: BisectResult) -> str:
    said = []
    if sum(len(axis.values) > 1 for axis in result.axes) > 1:
        who = _join([_say_set(one) for one in result.culprits])
        said.append(f"Not Transformer Engine: {who}." if "te" in result.innocent else f"The cause is {who}.")
    if len(result.culprits) > 1:
        said.append(f"Each of them breaks {result.module} without the other.")
    for turn in (turn for one in result.culprits for turn in one.turns):
        start = f"{turn.last_good} is the last good one" if turn.last_good else "no value was seen to be good"
        which = "" if turn.is_closed else " (one of these)"
        said.append(f"{result.module} breaks first with {_name(turn.axis)} {_list(turn.first_bad)}{which}; {start}.")
    return " ".join(said)


def _say_set(culprit: AxisCulprit) -> str:
    names = _join([_name(name) for name in culprit.axes])
    if len(culprit.axes) == 1:
        return names
    return f"{names} together" if culprit.is_minimal else f"one or more of {names}"


def _say_turn(turn: Turn, *, alone: bool) -> Iterator[str]:
    name = _name(turn.axis)
    if not alone:
        held = f" (with {_say_choices(turn.held)})" if turn.held else ""
        yield f"{name}: last good {turn.last_good or 'unknown'}, first bad {_list(turn.first_bad)}{held}"
    for value, reason in turn.untold.items():
        yield f"{name} {value} gives no answer: {first_sentence(reason)}"
    if turn.absent:
        yield f"{name} {_list(turn.absent)}: this host has no environment for it"
    if turn.untried:
        yield f"{name} {_list(turn.untried)}: not tried, because too many around gave no answer (--patience)"


def _say_next(result: BisectResult) -> str:
    match result.end:
        case SearchEnd.FOUND:
            turn = result.culprits[0].turns[0]
            step = f"; `nox -s te_canary -- {turn.last_good} {turn.first_bad[0]}` shows what changed in that step"
            return f"stay on {_name(turn.axis)} {turn.last_good}{step if turn.axis == 'te' else ''}"
        case SearchEnd.NARROWED:
            return "make one of the points usable that give no answer, and start the search again: its answers are kept"
        case SearchEnd.GOOD_IS_BAD:
            return "name an older good end, one that was seen to be good"
        case SearchEnd.BAD_IS_GOOD if result.tier == "static":
            return "search by the tier that runs the module: `--tier gpu` on a GPU host"
        case SearchEnd.BAD_IS_GOOD:
            return "compare what else differs from where the module was seen to fail, and give that as an --axis"
        case _:
            return "choose the nearest release that can be built and judged, or mend what stands in its way"


def _name(axis: str) -> str:
    return _NAMES.get(axis, axis)


def _say_choices(choices: Mapping[str, str]) -> str:
    return _join([f"{_name(name)} {value}" for name, value in choices.items()])


def _list(values: Sequence[str]) -> str:
    if len(values) <= _MOST_LISTED:
        return _join(values, "or")
    return f"{', '.join(values[:3])}, ... {values[-1]} ({len(values)} of them)"


def _join(names: Sequence[str], word: str = "and") -> str:
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else ""
