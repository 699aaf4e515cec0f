"""A search told: the sentence of each end, nothing left out, and nothing that a terminal or a page would obey."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from megacpp_validate.canary.dynamic.bisect_result import (
    Axis,
    AxisCulprit,
    BisectResult,
    Contradiction,
    PointResult,
    SearchEnd,
    Turn,
    Verdict,
)
from megacpp_validate.report import machine
from megacpp_validate.report.github import annotations as github
from megacpp_validate.report.terminal.bisect import render_bisect
from megacpp_validate.report.words.bisect import mark_point, say_headline

TE = Axis(name="te", values=("2.14.1", "2.15.0", "2.16.0", "2.17.0"))
CUDNN = Axis(name="cudnn", values=("9.14.0", "9.19.0", "9.21.0"))
GOOD = PointResult(choices=("2.14.1",), verdict=Verdict.GOOD, reason="pass", good=1)
BAD = PointResult(choices=("2.17.0",), verdict=Verdict.BAD, reason="error: cuDNN raises", bad=1)
DARK = PointResult(choices=("2.15.0",), verdict=Verdict.CANNOT_TELL, reason="blocked by imports")


def turn(axis: str, good: str, *bad: str, **more: object) -> Turn:
    return Turn(axis=axis, last_good=good, first_bad=bad, **more)  # type: ignore[arg-type]


def culprit(*turns: Turn, is_minimal: bool = True) -> AxisCulprit:
    return AxisCulprit(axes=tuple(one.axis for one in turns), is_minimal=is_minimal, turns=turns)


def result(end: SearchEnd, *culprits: AxisCulprit, axes: tuple[Axis, ...] = (TE,), **more: object) -> BisectResult:
    return BisectResult(
        tool="test", module="attention", tier="gpu", axes=axes, end=end, culprits=culprits,
        **{"points": (GOOD, BAD), "environments": 2, "runs": 2, "best": 4, **more},  # type: ignore[arg-type]
    )  # fmt: skip


PAIR = (TE, CUDNN)
TWO = tuple(PointResult(choices=("2.14.1", value), verdict=Verdict.GOOD, good=1) for value in CUDNN.values)
CASES: dict[str, tuple[BisectResult, list[str]]] = {
    "found": (
        result(SearchEnd.FOUND, culprit(turn("te", "2.15.0", "2.16.0"))),
        ["attention breaks first with Transformer Engine 2.16.0; 2.15.0 is the last good one.", "2.15.0 2.16.0",
         "taken for granted that what is bad stays bad, and that a run is right (--flaky says how often not)"],
    ),
    "narrowed": (
        result(
            SearchEnd.NARROWED,
            culprit(turn("te", "2.14.1", "2.15.0", "2.16.0", "2.17.0", untold={"2.15.0": "blocked by imports"},
                         absent=("2.16.0",))),
            points=(GOOD, BAD, DARK),
        ),
        [
            "breaks first with Transformer Engine 2.15.0, 2.16.0 or 2.17.0: one of these; 2.14.1 is the last",
            "Transformer Engine 2.15.0 gives no answer: blocked by imports",
            "Transformer Engine 2.16.0: there is no environment for it here",
        ],
    ),
    "untried": (
        result(SearchEnd.NARROWED, culprit(turn("te", "2.14.1", "2.15.0", "2.16.0", "2.17.0", untried=("2.16.0",)))),
        ["Transformer Engine 2.16.0: not tried", "--patience"],
    ),
    "not-te": (
        result(SearchEnd.FOUND, culprit(turn("cudnn", "9.14.0", "9.19.0", held={"te": "2.14.1"})),
               axes=PAIR, points=TWO, innocent=("te",)),
        [
            "Not Transformer Engine: cuDNN. attention breaks first with cuDNN 9.19.0; 9.14.0 is the last good one.",
            "(with Transformer Engine 2.14.1)",
            "stay on cuDNN 9.14.0",
        ],
    ),
    "not-cleared": (
        result(SearchEnd.FOUND, culprit(turn("cudnn", "9.14.0", "9.19.0")), axes=PAIR, points=TWO),
        ["It is cuDNN. attention breaks", "Whether Transformer Engine would be bad without it as well"],
    ),
    "together": (
        result(SearchEnd.FOUND, culprit(turn("te", "2.15.0", "2.16.0"), turn("cudnn", "9.14.0", "9.19.0")),
               axes=PAIR, points=TWO),
        ["It is Transformer Engine and cuDNN together.", "None of them breaks attention without the others."],
    ),
    "either": (
        result(SearchEnd.FOUND, culprit(turn("te", "2.15.0", "2.16.0")), culprit(turn("cudnn", "9.14.0", "9.19.0")),
               axes=PAIR, points=TWO),
        ["It is Transformer Engine and cuDNN.", "Each of them breaks attention without the other."],
    ),
    "not-told-apart": (
        result(SearchEnd.NARROWED,
               culprit(turn("te", "2.15.0", "2.16.0"), turn("cudnn", "", "9.14.0", "9.19.0"), is_minimal=False),
               axes=PAIR, points=TWO),
        ["It is one or more of Transformer Engine and cuDNN.", "none was seen to be good", "it takes could not"],
    ),
    "good-is-bad": (
        result(SearchEnd.GOOD_IS_BAD, points=(BAD,)),
        ["The good end is bad already: attention fails with Transformer Engine 2.14.1: error: cuDNN raises."],
    ),
    "bad-is-good": (
        result(SearchEnd.BAD_IS_GOOD),
        ["The bad end is good: attention holds with Transformer Engine 2.17.0 on the gpu tier.", "as an --axis"],
    ),
    "end-untold": (
        result(SearchEnd.END_UNTOLD, points=(GOOD, DARK)),
        ["The bad end cannot be told: Transformer Engine 2.17.0: blocked by imports."],
    ),
    "end-unbuilt": (
        result(SearchEnd.END_UNBUILT, points=(DARK,)),
        ["The good end cannot be built: Transformer Engine 2.14.1: blocked by imports."],
    ),
    "mended": (
        result(SearchEnd.FOUND, culprit(turn("te", "2.14.1", "2.15.0")),
               contradictions=(Contradiction(bad=("2.15.0",), good=("2.16.0",)),)),
        ["Bad with Transformer Engine 2.15.0, and good again with Transformer Engine 2.16.0", "one turn of several"],
    ),
    "flaky": (
        result(SearchEnd.FOUND, culprit(turn("te", "2.14.1", "2.15.0")), flaky=0.1, error=0.01, confidence=0.9934,
               points=(GOOD.model_copy(update={"good": 7, "bad": 4}), BAD), unlike_stated=(("2.14.1",),)),
        [
            "Right with a probability of 0.9934, if a run is wrong with 0.1; 1 point gave both answers.",
            "7 good and 4 bad runs with Transformer Engine 2.14.1: more than a flakiness of 0.1 explains",
            "7 good, 4 bad",
        ],
    ),
}  # fmt: skip


def flat(text: str) -> str:
    return " ".join(text.replace("`", "").split())


def print_terminal(told: BisectResult) -> str:
    stream = io.StringIO()
    render_bisect(told, console=Console(file=stream, width=10_000, color_system=None))
    return flat(stream.getvalue())


@pytest.mark.parametrize(("told", "words"), CASES.values(), ids=CASES)
def test_each_answer_is_said_in_words(told: BisectResult, words: list[str]) -> None:
    text = print_terminal(told)
    for word in words:
        assert word in text
    assert "next" in text


@pytest.mark.parametrize("name", CASES)
def test_every_point_is_in_every_form(name: str) -> None:
    told, _ = CASES[name]
    page = github.render_step_summary(told)
    for text in (print_terminal(told), page):
        for point in told.points:
            assert all(choice in text for choice in point.choices if name != "found" or choice != "te")
            assert mark_point(point.verdict).word in text
    assert machine.read_json(machine.to_json(told)) == told


def test_there_is_a_case_for_every_end() -> None:
    assert {told.end for told, _ in CASES.values()} == set(SearchEnd)
    assert len({say_headline(told) for told, _ in CASES.values()}) >= len(SearchEnd)


def test_what_a_vendor_says_is_shown_and_not_obeyed() -> None:
    nasty = "[red]x[/red] \x1b[2J | a <script> `code`"
    told = result(SearchEnd.FOUND, culprit(turn("te", "2.14.1", "2.15.0")), points=(
        GOOD, BAD.model_copy(update={"reason": nasty})))  # fmt: skip
    text, page = print_terminal(told), github.render_step_summary(told)
    assert "\x1b" not in text + page
    assert "[red]x[/red]" in text
    assert "<script>" not in page
    row = next(line for line in page.splitlines() if "red" in line)
    assert row.replace("\\|", "").count("|") == 5
