"""The answer of a search in sentences, for every form that tells it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, assert_never

from ...canary.dynamic.bisect_result import Axis, AxisCulprit, BisectResult, PointResult, SearchEnd, Turn, Verdict
from ..marks import Mark
from ..summaries import count, first_sentence

_NAMES: Final = {
    "te": "Transformer Engine",
    "torch": "torch",
    "cudnn": "cuDNN",
    "cublas": "cuBLAS",
    "cudart": "the CUDA runtime",
    "nccl": "NCCL",
    "triton": "Triton",
    "flash-attn": "flash-attn",
    "deep-gemm": "DeepGEMM",
}
_MOST_LISTED: Final = 6


class PointRow(NamedTuple):
    """A point as a row of a table."""

    choices: tuple[str, ...]
    mark: Mark
    runs: str
    reason: str


def say_axis(name: str) -> str:
    """What people call a component."""
    return _NAMES.get(name, name)


def mark_point(verdict: Verdict) -> Mark:
    """How the verdict on a point looks."""
    match verdict:
        case Verdict.GOOD:
            return Mark("✓", "-", "good", "good")
        case Verdict.BAD:
            return Mark("✗", "X", "bad", "bad")
        case Verdict.CANNOT_BUILD:
            return Mark("○", "?", "cannot build", "risk")
        case Verdict.CANNOT_TELL:
            return Mark("○", "?", "cannot tell", "risk")
        case _:
            assert_never(verdict)


def find_moving(result: BisectResult) -> tuple[Axis, ...]:
    """The axes that change."""
    return tuple(axis for axis in result.axes if len(axis.values) > 1)


def list_points(result: BisectResult) -> Iterator[PointRow]:
    """A row a point, in the order in which they were asked for; only axes that change."""
    shown = [number for number, axis in enumerate(result.axes) if len(axis.values) > 1]
    for point in result.points:
        choices = tuple(point.choices[number] for number in shown)
        yield PointRow(choices, mark_point(point.verdict), _say_runs(point), first_sentence(point.reason))


def say_headline(result: BisectResult) -> str:
    """The answer in a sentence or two."""
    good, bad = (_say_place(result.axes, at) for at in (0, -1))
    match result.end:
        case SearchEnd.FOUND | SearchEnd.NARROWED:
            return _say_found(result)
        case SearchEnd.GOOD_IS_BAD:
            return f"The good end is bad already: {result.module} fails with {good}: {_why(result, 0)}."
        case SearchEnd.BAD_IS_GOOD:
            return f"The bad end is good: {result.module} holds with {bad} on the {result.tier} tier."
        case SearchEnd.END_UNTOLD | SearchEnd.END_UNBUILT:
            at = len(result.points) - 1
            verb = "built" if result.end is SearchEnd.END_UNBUILT else "told"
            return f"The {('good', 'bad')[at]} end cannot be {verb}: {(good, bad)[at]}: {_why(result, at)}."
        case _:
            assert_never(result.end)


def say_turns(result: BisectResult) -> Iterator[str]:
    """Where along each axis it turns bad, and what could not be told, a sentence each."""
    for culprit in result.culprits:
        for turn in culprit.turns:
            if len(find_moving(result)) > 1:
                yield _say_turn(turn)
            yield from _say_untold(turn)
        if not culprit.is_minimal:
            names = _join([say_axis(name) for name in culprit.axes])
            yield f"Which of {names} it takes could not be told: what leaves one of them out gives no answer."


def say_doubts(result: BisectResult) -> Iterator[str]:
    """Whatever speaks against the answer, or bounds how far it is to be believed."""
    for found in result.contradictions:
        yield (
            f"Bad with {_say_choices(result, found.bad)}, and good again with {_say_choices(result, found.good)}: it "
            "was mended and broken more than once, so this is one turn of several"
        )
    for choices in result.unlike_stated:
        point = next(p for p in result.points if p.choices == choices)
        yield (
            f"{point.good} good and {point.bad} bad runs with {_say_choices(result, choices)}: more than a flakiness "
            f"of {result.flaky:g} explains"
        )
    if result.culprits and not _are_others_cleared(result):
        left = [axis.name for axis in find_moving(result) if axis.name not in _named(result)]
        names = _join([say_axis(name) for name in left if name not in result.innocent])
        yield f"Whether {names} would be bad without it as well could not be told"


def say_cost(result: BisectResult) -> str:
    """Runs and environments beside the best possible, and the confidence."""
    reused = sum(point.reused for point in result.points)
    again = f", {reused} of them known from an earlier search" if reused else ""
    text = f"{count(result.environments, 'environment')}, {count(result.runs, 'run')}{again}; {result.seconds:.0f} s."
    if result.end in (SearchEnd.FOUND, SearchEnd.NARROWED):
        text += f" No search is sure to do with fewer than {result.best}."
        once = (
            ", and that a run is right (--flaky says how often not)"
            if result.tier == "gpu" and not result.flaky
            else ""
        )
        text += f" It is taken for granted that what is bad stays bad{once}."
    if result.flaky:
        flaky = sum(point.is_flaky for point in result.points)
        text += (
            f" Right with a probability of {result.confidence:.4f}, if a run is wrong with {result.flaky:g}; "
            f"{count(flaky, 'point')} gave both answers."
        )
    return text


def say_next(result: BisectResult) -> str:
    """What to do."""
    match result.end:
        case SearchEnd.FOUND:
            turn = result.culprits[0].turns[0]
            stay = f"stay on {say_axis(turn.axis)} {turn.last_good}"
            if turn.axis == "te" and len(turn.first_bad) == 1:
                step = f"`nox -s te_canary -- {turn.last_good} {turn.first_bad[0]}` says what changed in that step"
                return f"{stay}; {step}"
            return stay
        case SearchEnd.NARROWED:
            return "make one of the points buildable that give no answer, and start it again: what is known is kept"
        case SearchEnd.GOOD_IS_BAD:
            return "name an older good end, one that was seen to be good"
        case SearchEnd.BAD_IS_GOOD:
            other = "ask the tier that runs it: `--tier gpu` on a GPU host" if result.tier == "static" else ""
            return other or "compare what else differs from where it was seen to fail, and give that as an --axis"
        case SearchEnd.END_UNTOLD | SearchEnd.END_UNBUILT:
            return "choose the nearest release that can be, or mend what stands in its way"
        case _:
            assert_never(result.end)


def _say_found(result: BisectResult) -> str:
    moving = find_moving(result)
    if not result.culprits:
        return "The answers contradict each other, and no axis is to blame by them."
    sentences = []
    if len(moving) > 1 and "te" in result.innocent:
        sentences.append(f"Not Transformer Engine: {_join([_say_set(one) for one in result.culprits], 'and')}.")
    elif len(moving) > 1:
        sentences.append(f"It is {_join([_say_set(one) for one in result.culprits], 'and')}.")
    first = result.culprits[0]
    if len(result.culprits) > 1:
        sentences.append(f"Each of them breaks {result.module} without the other.")
    elif len(first.axes) > 1 and first.is_minimal:
        sentences.append(f"None of them breaks {result.module} without the others.")
    sentences += [_say_where(result.module, turn) for one in result.culprits for turn in one.turns]
    return " ".join(sentences)


def _say_set(culprit: AxisCulprit) -> str:
    names = [say_axis(name) for name in culprit.axes]
    if len(names) == 1:
        return names[0]
    return f"{_join(names, 'and')} together" if culprit.is_minimal else f"one or more of {_join(names, 'and')}"


def _say_where(module: str, turn: Turn) -> str:
    name = say_axis(turn.axis)
    if turn.is_closed:
        return f"{module} breaks first with {name} {turn.first_bad[0]}; {turn.last_good} is the last good one."
    start = f"{turn.last_good} is the last that was seen to be good" if turn.last_good else "none was seen to be good"
    return f"{module} breaks first with {name} {_list(turn.first_bad)}: one of these; {start}."


def _say_turn(turn: Turn) -> str:
    held = _join([f"{say_axis(name)} {value}" for name, value in turn.held.items()], "and")
    last = turn.last_good or "nothing that could be told"
    text = f"{say_axis(turn.axis)}: last good {last}, first bad {_list(turn.first_bad)}"
    return f"{text} (with {held})" if held else text


def _say_untold(turn: Turn) -> Iterator[str]:
    for value, reason in turn.untold.items():
        yield f"{say_axis(turn.axis)} {value} gives no answer: {first_sentence(reason)}"
    if turn.absent:
        yield f"{say_axis(turn.axis)} {_list(turn.absent)}: there is no environment for it here"
    if turn.untried:
        yield (
            f"{say_axis(turn.axis)} {_list(turn.untried)}: not tried, because too many around gave no answer "
            "(--patience sets how many)"
        )


def _are_others_cleared(result: BisectResult) -> bool:
    return {axis.name for axis in find_moving(result)} == _named(result) | set(result.innocent)


def _named(result: BisectResult) -> set[str]:
    return {name for culprit in result.culprits for name in culprit.axes}


def _say_place(axes: Sequence[Axis], at: int) -> str:
    return _join([f"{say_axis(axis.name)} {axis.values[at]}" for axis in axes], "and")


def _say_choices(result: BisectResult, choices: Sequence[str]) -> str:
    pairs = zip(result.axes, choices, strict=True)
    return _join([f"{say_axis(axis.name)} {value}" for axis, value in pairs if len(axis.values) > 1], "and")


def _why(result: BisectResult, at: int) -> str:
    return first_sentence(result.points[at].reason).rstrip("., ") or "no reason given"


def _say_runs(point: PointResult) -> str:
    if not point.verdict.tells and not (point.good or point.bad):
        return ""
    return f"{point.good} good, {point.bad} bad" if point.is_flaky else str(point.good + point.bad)


def _list(values: Sequence[str]) -> str:
    if len(values) <= _MOST_LISTED:
        return _join(list(values), "or")
    return f"{', '.join(values[:3])}, ... {values[-1]} ({len(values)} of them)"


def _join(names: Sequence[str], word: str = "and") -> str:
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else ""
