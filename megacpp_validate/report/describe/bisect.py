"""A search for the first bad release in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from megacpp_validate.text import count, first_sentence

from ...canary.dynamic.bisect import Answer, BisectResult, SearchEnd, Turn, Verdict
from ..document import Content, Diagnostic, Document, Table
from ..marks import bad, mark_of, missing, risk
from .words import tabulate_facts

_NAMES: Final = {
    "te": "Transformer Engine", "cudnn": "cuDNN", "cublas": "cuBLAS", "cudart": "the CUDA runtime", "nccl": "NCCL",
    "triton": "Triton", "deep-gemm": "DeepGEMM",
}  # fmt: skip
_ANSWERS: Final = {
    SearchEnd.GOOD_IS_BAD: "The good end is bad already: {why}.",
    SearchEnd.BAD_IS_GOOD: "The bad end is good.",
    SearchEnd.END_UNTOLD: "An end cannot be judged: {why}.",
    SearchEnd.END_UNBUILT: "An end cannot be built: {why}.",
}
_NEXT: Final = {
    SearchEnd.NARROWED: "make one of the points without a result usable, and run again: finished receipts are reused",
    SearchEnd.GOOD_IS_BAD: "name an older good end, one that was seen to be good",
    SearchEnd.BAD_IS_GOOD: "search by `--tier gpu`, which runs the module, or give what else differs as --axis",
    SearchEnd.END_UNTOLD: "choose the nearest release that can be judged",
    SearchEnd.END_UNBUILT: "choose the nearest release that can be built",
}


def describe_run(choices: Mapping[str, str], answer: Answer) -> str:
    """One run of a search in a line."""
    reason = "" if answer.verdict is Verdict.GOOD else f": {first_sentence(answer.reason)}"
    return f"{mark_of(answer.verdict).word:12} {_join(choices)}{reason}"


def describe_bisect(result: BisectResult) -> Document:
    """The answer, every point that was tried, and what contradicts the answer."""
    moving = [number for number, axis in enumerate(result.axes) if len(axis.values) > 1]
    rows: tuple[tuple[Content, ...], ...] = tuple(
        (
            *(point.choices[number] for number in moving),
            mark_of(point.verdict),
            str(point.runs),
            first_sentence(point.reason),
        )
        for point in result.points
    )
    columns = (*(_name(result.axes[number].name) for number in moving), "verdict", "runs", "reason")
    facts: dict[str, Sequence[str]] = {}
    for turn in result.culprits:
        facts |= _list_facts(turn)
    step = _find_next_step(result)
    runs = count(sum(point.runs for point in result.points), "run")
    facts |= {
        "cost": f"{count(result.points, 'point')}, {runs}, {result.seconds:.0f} s",
        "assumed": "what is bad stays bad in later releases",
        "next step": step,
    }
    summary = f"{_summarize(result)} Judged by the {result.tier} tier."
    mark = bad("found") if result.end is SearchEnd.FOUND else risk(result.end.value.replace("-", " "))
    case = Diagnostic(result.module, mark, "te_bisect", summary, help=step, seconds=result.seconds)
    if result.end in (SearchEnd.END_UNTOLD, SearchEnd.END_UNBUILT):
        mark = missing("no answer")
    blocks = (Table(columns, rows), tabulate_facts(facts))
    return Document(f"First bad release for {result.module}", summary, mark, blocks, (case,))


def _summarize(result: BisectResult) -> str:
    if result.end in _ANSWERS:
        why = first_sentence(result.points[-1].reason).rstrip("., ") if result.points else "unknown"
        return _ANSWERS[result.end].format(why=why)
    causes = " or ".join(_name(turn.axis) for turn in result.culprits)
    parts = [f"{'Not Transformer Engine:' if 'te' in result.innocent else 'The cause is'} {causes}."]
    which = " (one of these)" if result.end is SearchEnd.NARROWED else ""
    several = sum(len(axis.values) > 1 for axis in result.axes) > 1
    for turn in result.culprits:
        held = f", together with {_join(turn.held)}" if several and not result.innocent else ""
        first = f"{_name(turn.axis)} {_list(turn.first_bad)}{which}{held}"
        parts.append(f"{result.module} breaks first with {first}; {turn.last_good or 'none'} is the last good one.")
    return " ".join(parts)


def _list_facts(turn: Turn) -> dict[str, Sequence[str]]:
    name = _name(turn.axis)
    return {
        f"{name}: last good": turn.last_good or "unknown",
        f"{name}: first bad": _list(turn.first_bad),
        f"{name}: searched with": _join(turn.held),
        f"{name}: no answer": tuple(f"{value}: {first_sentence(reason)}" for value, reason in turn.untold.items()),
    }


def _find_next_step(result: BisectResult) -> str:
    if result.end in _NEXT:
        return _NEXT[result.end]
    turn = result.culprits[0]
    step = f"; `nox -s te_canary -- {turn.last_good} {turn.first_bad[0]}` shows what changed in that step"
    return f"stay on {_name(turn.axis)} {turn.last_good}{step if turn.axis == 'te' else ''}"


def _name(axis: str) -> str:
    return _NAMES.get(axis, axis)


def _join(choices: Mapping[str, str]) -> str:
    return " and ".join(f"{_name(name)} {value}" for name, value in choices.items())


def _list(values: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(values[:-1]), values[-1])))
