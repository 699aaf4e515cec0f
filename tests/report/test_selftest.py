"""The suite's own score in words, in a terminal and in Markdown: whatever is not as it should be is told in each."""

from __future__ import annotations

import html
import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from megacpp_validate.evidence.selftest import FalseAlarm, Fate, Fault, Mutant, MutantResult, SelftestResult
from megacpp_validate.report.markdown.selftest import tell_selftest
from megacpp_validate.report.terminal.selftest import render_selftest
from megacpp_validate.report.words.selftest import ModuleScore, find_unsettled, say_unsettled, score_modules
from tests.report.reading import flat


def result_of(module: str, fate: Fate = Fate.KILLED, *blamed: str, reason: str = "", name: str = "") -> MutantResult:
    mutant = Mutant(
        name or f"{module}-halved", module, "vendor", "te", "linear", Fault.SCALED, "every output is halved"
    )
    blamed = blamed or ((module,) if fate is Fate.KILLED else ())
    return MutantResult(mutant, fate, blamed, check="bf16.forward (factor)" if blamed else "", reason=reason)


GOOD = result_of("attention")
SURVIVOR = result_of("permute", Fate.SURVIVED, reason="every probe was good")
ASTRAY = result_of("linear_walker", Fate.KILLED, "imports", "linear_walker")
MODULES = ("imports", "attention", "linear_walker", "permute")
CLEAN = SelftestResult(MODULES, (GOOD,), clean_runs=200, seconds=61.4)
ALARM = FalseAlarm("te-cpu-attention", 17, "bf16.grad.key (relative-error)")
LOST = "clean run with seed 5: killed after 120 s"


def print_it(result: SelftestResult, *, verbose: bool = False, width: int = 10_000) -> str:
    stream = io.StringIO()
    render_selftest(result, verbose=verbose, console=Console(file=stream, width=width, _environ={}))
    return stream.getvalue()


def mark_it_down(result: SelftestResult) -> str:
    return html.unescape("\n".join(tell_selftest(result)))


TOLD: dict[str, Callable[[SelftestResult], str]] = {"terminal": print_it, "markdown": mark_it_down}
FORMS = pytest.mark.parametrize("tell", TOLD.values(), ids=TOLD)

# What is wrong -> (the result, what each form says of it)
WRONG: dict[str, tuple[SelftestResult, tuple[str, ...]]] = {
    "a survivor": (
        replace(CLEAN, mutants=(GOOD, SURVIVOR)),
        ("permute-halved", "survived: every probe was good", "1 of 2 mutants (50.0%)"),
    ),
    "a wrong blame": (
        replace(CLEAN, mutants=(GOOD, ASTRAY)),
        (
            "linear_walker-halved",
            "killed, and blamed on imports, linear_walker instead of linear_walker, by bf16.forward (factor)",
            "1 of 2 killed mutants are blamed on their own module (50.0%)",
        ),
    ),
    "a false alarm": (
        replace(CLEAN, false_alarms=(ALARM,)),
        (
            "false alarm: te-cpu-attention, seed 17: bf16.grad.key (relative-error)",
            "False alarms: 1 in 200 clean probe runs",
            "(0.50%; 95% Wilson upper bound 2.78%)",  # 1 of 200, by the formula in `wilson_interval`
        ),
    ),
    "a lost run": (replace(CLEAN, lost=(LOST,)), (f"lost: {LOST}",)),
    "a fault that was not planted": (
        replace(CLEAN, mutants=(result_of("permute", Fate.NOT_PLANTED, reason="linear is gone"),)),
        ("permute-halved", "not-planted: linear is gone", "0 of 1 mutants"),
    ),
    "a fault that no probe reaches": (
        replace(CLEAN, mutants=(result_of("permute", Fate.NOT_REACHED, reason="no probe runs linear"),)),
        ("permute-halved", "not-reached: no probe runs linear"),
    ),
    "a mutant without a run": (
        replace(CLEAN, mutants=(result_of("permute", Fate.NOT_RUN),)),
        ("permute-halved", "not-run"),
    ),
}  # fmt: skip


@FORMS
@pytest.mark.parametrize(("result", "words"), WRONG.values(), ids=WRONG)
def test_what_is_not_as_it_should_be_is_told(
    result: SelftestResult, words: tuple[str, ...], tell: Callable[[SelftestResult], str]
) -> None:
    assert not result.holds
    told = flat(tell(result))
    for word in words:
        assert word in told


@FORMS
def test_nothing_is_said_where_nothing_is_wrong(tell: Callable[[SelftestResult], str]) -> None:
    told = flat(tell(CLEAN))
    assert CLEAN.holds
    assert "Kill rate: 1 of 1 mutants (100.0%)." in told
    for word in ("attention-halved", "false alarm:", "lost:", "survived", "✗"):
        assert word not in told


def test_a_module_is_ticked_only_where_every_mutant_was_killed_and_blamed_rightly() -> None:
    told = print_it(replace(CLEAN, mutants=(GOOD, ASTRAY, SURVIVOR)))
    marks = {line.split()[1]: line.split()[0] for line in told.splitlines() if line.strip()[:1] in set("✓✗·")}
    assert {name: marks[name] for name in MODULES} == {
        "imports": "·",  # no mutant: neither good nor bad
        "attention": "✓",
        "linear_walker": "✗",
        "permute": "✗",
    }


def test_the_score_of_each_module() -> None:
    assert list(score_modules(replace(CLEAN, mutants=(GOOD, GOOD, ASTRAY, SURVIVOR)))) == [
        ModuleScore("imports", 0, 0, 0),
        ModuleScore("attention", 2, 2, 2),
        ModuleScore("linear_walker", 1, 1, 0),
        ModuleScore("permute", 1, 0, 0),
    ]
    rows = [line for line in tell_selftest(CLEAN) if line.startswith("| ")]
    assert rows[1:] == [
        "| --- | --: | --: | --: |",
        "| imports | 0 | 0 | 0 |",
        "| attention | 1 | 1 | 1 |",
        "| linear_walker | 0 | 0 | 0 |",
        "| permute | 0 | 0 | 0 |",
    ]


@pytest.mark.parametrize("fate", [fate for fate in Fate if fate is not Fate.KILLED])
def test_only_a_kill_is_settled(fate: Fate) -> None:
    """Also where the blame would be right."""
    row = replace(GOOD, fate=fate)
    assert find_unsettled(replace(CLEAN, mutants=(GOOD, row))) == [row]
    assert say_unsettled(row) == fate.value


def test_every_mutant_is_listed_where_asked_for() -> None:
    assert "attention-halved" not in print_it(CLEAN)
    assert "attention-halved killed attention bf16.forward (factor)" in flat(print_it(CLEAN, verbose=True))


@FORMS
def test_what_a_process_wrote_is_shown_as_text(tell: Callable[[SelftestResult], str]) -> None:
    words = "[red]*x*[/red] <b> \x1b[31m"
    hostile = replace(CLEAN, mutants=(result_of("permute", Fate.NOT_RUN, reason=words),), lost=(words,))
    assert "\x1b" not in tell(hostile)
    assert tell(hostile).count("[red]*x*[/red] <b>") == 2
    assert not any(mark in line for line in tell_selftest(hostile) for mark in ("*x*", "<b>", "[red]"))


def test_it_fits_a_narrow_terminal() -> None:
    wrong = replace(CLEAN, mutants=(ASTRAY, SURVIVOR), false_alarms=(ALARM,), lost=(LOST,))
    assert all(len(line) <= 60 for line in print_it(wrong, verbose=True, width=60).splitlines())
