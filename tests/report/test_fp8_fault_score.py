"""The score of the FP8 cells as it is told: nothing that is not right is left out, in any form."""

from __future__ import annotations

import json
from io import StringIO

from rich.console import Console

from megacpp_validate.canary.dynamic.fp8_fault_score import CellSeen, Fp8FaultResult, Fp8FaultScore, Fp8Verdict
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.report.machine import to_json
from megacpp_validate.report.markdown.static_tier import render_step_summary
from megacpp_validate.report.terminal.fp8_faults import render_fp8_faults

RED = CellSeen(cell="fp8_delayed", outcome=Outcome.FAIL, right=("a.scale", "b.scale"), others=("c", "d", "e"))
CALM = CellSeen(cell="fp8_current", outcome=Outcome.PASS)
LOUD = CellSeen(cell="fp8_current", outcome=Outcome.FAIL, others=("forward",))


def new_result(name: str, verdict: Fp8Verdict, green: CellSeen | None = CALM, *, reason: str = "") -> Fp8FaultResult:
    return Fp8FaultResult(
        fault=name, release="2.20.2", says=f"{name} is planted.", verdict=verdict, wants=("*.scale",), cells=(RED,),
        green=green, reason=reason,
    )  # fmt: skip


def new_score() -> Fp8FaultScore:
    return Fp8FaultScore(
        tool="t",
        target="h200",
        environment="one H200",
        held_out=False,
        faults=(
            new_result("one", Fp8Verdict.CAUGHT),
            new_result("two", Fp8Verdict.CAUGHT, LOUD, reason="fp8_current is red by forward"),
            new_result("three", Fp8Verdict.BY_ANOTHER, reason="red by c"),
            new_result("four", Fp8Verdict.MISSED, reason="as in the clean copy"),
            new_result("five", Fp8Verdict.NOT_PLANTED, reason="no such lines"),
            new_result("six|<b>", Fp8Verdict.NOT_RUN, None, reason="stopped"),
        ),
    )


def in_terminal(score: Fp8FaultScore, *, verbose: bool = False) -> str:
    told = StringIO()
    render_fp8_faults(score, verbose=verbose, console=Console(file=told, width=220))
    return told.getvalue()


def test_nothing_is_left_out() -> None:
    for text in (in_terminal(new_score()), render_step_summary(new_score())):
        for row in new_score().faults:
            assert row.fault.partition("|")[0] in text
            assert row.reason in text
        assert "2 of 4 faults" in text
        assert "3 by any check" in text
        assert "1 of 5 turned red" in text
        assert "Not judged: 2 of 6 faults" in text
        assert "caught, with an alarm" in text
        assert "fp8_delayed: a.scale, b.scale, c and 2 more" in text


def test_green_cells_are_listed_where_asked_for() -> None:
    assert "fp8_current: pass" in in_terminal(new_score(), verbose=True)
    assert "fp8_current: pass" in render_step_summary(new_score())


def test_markdown_takes_what_others_wrote_as_text() -> None:
    assert "six|<b>" not in render_step_summary(new_score())


def test_what_was_held_out_says_so() -> None:
    assert "2 of 4 held-out faults" in in_terminal(new_score().model_copy(update={"held_out": True}))


def test_it_goes_to_json_and_back() -> None:
    assert Fp8FaultScore.model_validate(json.loads(to_json(new_score()))) == new_score()


def test_nothing_judged_says_why() -> None:
    score = new_score().model_copy(update={"faults": (), "environment": "not-run: no GPU"})
    for text in (in_terminal(score), render_step_summary(score)):
        assert "No fault was judged: not-run: no GPU" in text
