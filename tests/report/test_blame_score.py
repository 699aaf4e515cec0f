"""The score of the blame as it is told: nothing that is not right is left out, in any form."""

from __future__ import annotations

import json
from io import StringIO

from rich.console import Console

from megacpp_validate.canary.dynamic.blame_score import BlameScore, ControlResult, FaultResult, Verdict
from megacpp_validate.canary.dynamic.upgrade_result import Culprit
from megacpp_validate.evidence.values import Cause
from megacpp_validate.report.machine import to_json
from megacpp_validate.report.markdown.static_tier import render_step_summary
from megacpp_validate.report.terminal.blame_score import render_blame_score
from megacpp_validate.report.words.blame_score import score_modules

RIGHT = Culprit(
    module="attention", cause=Cause.NUMERICS, signature="s", summary="s", next_step="stay", cascades=("native_block",)
)
OTHER = Culprit(module="permute", cause=Cause.API, signature="s", summary="s", next_step="rename")


def new_result(name: str, verdict: Verdict, *culprits: Culprit, module: str = "attention") -> FaultResult:
    return FaultResult(
        fault=name, module=module, cause=Cause.NUMERICS, release="2.20.2", says=f"{name} is planted.", verdict=verdict,
        culprits=culprits, reason="" if verdict is Verdict.RIGHT else f"because of {name}",
    )  # fmt: skip


def new_score() -> BlameScore:
    return BlameScore(
        tool="t",
        target="h200",
        environment="one H200",
        modules=("attention", "permute", "layer_spec"),
        faults=(
            new_result("one", Verdict.RIGHT, RIGHT),
            new_result("two", Verdict.OTHERS_TOO, RIGHT, OTHER),
            new_result("three", Verdict.WRONG_CAUSE, OTHER, module="permute"),
            new_result("four", Verdict.WRONG_MODULE, OTHER),
            new_result("five", Verdict.MISSED),
            new_result("six", Verdict.NOT_PLANTED),
            new_result("seven|<b>", Verdict.NOT_RUN),
        ),
        controls=(
            ControlResult(name="quiet", release="2.20.2", seed=1, timed=True),
            ControlResult(name="loud", release="2.20.2", seed=2, timed=False, culprits=(OTHER,)),
            ControlResult(name="absent", release="2.20.2", seed=3, timed=False, reason="stopped"),
        ),
    )


def in_terminal(score: BlameScore, *, verbose: bool = False) -> str:
    told = StringIO()
    render_blame_score(score, verbose=verbose, console=Console(file=told, width=200))
    return told.getvalue()


def test_counts_are_of_what_was_judged() -> None:
    rows = {row.module: row for row in score_modules(new_score())}
    assert rows["attention"][1:6] == (4, 2, 2, 1, 1)
    assert rows["permute"][1:6] == (1, 1, 0, 1, 0)
    assert rows["layer_spec"].cells == ("0", "0", "0", "0", "0", "")
    assert rows["all"][1:6] == (5, 3, 2, 2, 1)


def test_nothing_that_is_not_right_is_left_out() -> None:
    for text in (in_terminal(new_score()), render_step_summary(new_score())):
        for row in new_score().faults[1:]:
            assert row.fault.partition("|")[0] in text
            assert row.reason.partition("|")[0] in text
        assert "1 of 5 faults" in text
        assert "1 of 2 name somebody" in text
        assert "Not judged: 2 of 7 faults" in text
        assert "loud" in text
        assert "absent" in text


def test_every_fault_is_listed_where_asked_for() -> None:
    assert "attention (numerics), and with it native_block" in in_terminal(new_score(), verbose=True)
    assert "attention (numerics), and with it native_block" in render_step_summary(new_score())


def test_markdown_takes_what_others_wrote_as_text() -> None:
    assert "seven|<b>" not in render_step_summary(new_score())


def test_it_goes_to_json_and_back() -> None:
    text = to_json(new_score())
    assert BlameScore.model_validate(json.loads(text)) == new_score()


def test_nothing_judged_says_why() -> None:
    score = new_score().model_copy(update={"faults": (), "controls": (), "environment": "not-run: no GPU"})
    for text in (in_terminal(score), render_step_summary(score)):
        assert "No fault was judged: not-run: no GPU" in text
