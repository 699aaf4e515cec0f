"""The score of the smoke run's checks as it is told: nothing is left out, and the page is of its evidence."""

from __future__ import annotations

import json
from io import StringIO

from rich.console import Console

from megacpp_validate.canary.dynamic.smoke_fault_score import (
    CleanResult,
    SmokeFaultResult,
    SmokeFaultScore,
    SmokeFaultVerdict,
    SmokeFinding,
)
from megacpp_validate.catalog.bridge import PACKAGE_ROOT, Catalog
from megacpp_validate.catalog.smoke_faults import read_smoke_faults
from megacpp_validate.report.machine import to_json
from megacpp_validate.report.markdown.static_tier import render_step_summary
from megacpp_validate.report.terminal.smoke_faults import render_smoke_faults

DOCS = PACKAGE_ROOT.parent / "docs"
RIGHT = SmokeFinding(check="watch", named={"step": 2, "ranks": [0, 1], "module": "layers.3"}, words="so")
OTHER = SmokeFinding(check="reproduce", named={"step": 4, "module": "head"}, words="so")


def new_row(name: str, verdict: SmokeFaultVerdict, *findings: SmokeFinding, **more: object) -> SmokeFaultResult:
    given = {
        "fault": name, "planted": "nan:2", "says": f"{name} is planted.", "cell": "c", "title": "two ranks", "ranks": 2,
        "way": "train", "held_out": False, "caught_by": "watch", "wants": {"step": 2}, "verdict": verdict,
        "findings": findings, **more,
    }  # fmt: skip
    return SmokeFaultResult.model_validate(given)


def new_score() -> SmokeFaultScore:
    caught = SmokeFaultVerdict.CAUGHT
    return SmokeFaultScore(
        tool="t",
        target="cpu",
        environment="Python 3.11",
        faults=(
            new_row("one", caught, RIGHT, OTHER, named=True),
            new_row("two", caught, OTHER, RIGHT, named=False, reason="step is 2 and must be 3", wants={"step": 3}),
            new_row("three", SmokeFaultVerdict.BY_ANOTHER, OTHER, reason="watch says nothing; reproduce does"),
            new_row("four", SmokeFaultVerdict.MISSED, reason="no check says anything", held_out=True),
            new_row("five|<b>", SmokeFaultVerdict.NOT_RUN, reason="not of cpu", elsewhere=True),
        ),
        clean=(
            CleanResult(cell="c", title="two ranks", way="train", ending="done"),
            CleanResult(cell="c", title="two ranks", way="save", ending="done", findings=(OTHER,)),
            CleanResult(cell="c", title="two ranks", way="evaluate", ending="died"),
        ),
        seconds=90,
    )


def in_terminal(score: SmokeFaultScore, *, verbose: bool = False) -> str:
    told = StringIO()
    render_smoke_faults(score, verbose=verbose, console=Console(file=told, width=240))
    return told.getvalue()


def test_nothing_is_left_out() -> None:
    for text in (in_terminal(new_score(), verbose=True), render_step_summary(new_score())):
        for row in new_score().faults:
            assert row.fault.partition("|")[0] in text
            assert row.reason in text
        assert "1 of 4 planted faults" in text
        assert "2 are caught by it" in text
        assert "0 of 1 of those that were held out" in text
        assert "2 of 3 gave a false alarm" in text
        assert "Not judged: 1 of 5 faults" in text
        assert "step 2, ranks 0, 1, module layers.3" in text
        assert "must be step 3" in text
        assert "comparison with one rank: step 4, module head" in text
        assert "died" in text


def test_markdown_takes_what_others_wrote_as_text() -> None:
    assert "five|<b>" not in render_step_summary(new_score())


def test_it_goes_to_json_and_back() -> None:
    assert SmokeFaultScore.model_validate(json.loads(to_json(new_score()))) == new_score()


def test_nothing_was_judged() -> None:
    empty = new_score().model_copy(update={"faults": new_score().faults[-1:], "clean": ()})
    for text in (in_terminal(empty), render_step_summary(empty)):
        assert "No fault was judged" in text


def read_page() -> SmokeFaultScore:
    return SmokeFaultScore.model_validate_json((DOCS / "evidence" / "smoke_faults.json").read_text(encoding="utf-8"))


def test_the_page_is_of_its_evidence() -> None:
    assert (DOCS / "examples" / "smoke_faults.md").read_text(encoding="utf-8") == render_step_summary(read_page())


def test_the_evidence_is_of_the_matrix(catalog: Catalog) -> None:
    known = read_smoke_faults(target.id for target in catalog.targets)
    assert [(row.fault, row.planted, row.cell, row.caught_by, dict(row.wants)) for row in read_page().faults] == [
        (row.id, row.fault, row.plan, row.caught_by, dict(row.names)) for row in known.faults
    ]


def test_the_evidence_opens_the_door() -> None:
    score = read_page()
    assert not score.breaks
    assert not score.lacks
    assert {run.way for run in score.clean} == {"train", "evaluate", "save"}
