"""A planted fault is caught only by its own check, and named only by every word that it must name."""

from __future__ import annotations

import pytest

from megacpp_validate.canary.dynamic.planting import judge_finding
from megacpp_validate.canary.dynamic.scores import CleanResult, FaultResult, FaultScore, SmokeFinding, Verdict

WATCH = SmokeFinding(check="watch", named={"step": 2, "ranks": [1], "module": "layers.3"}, words="so")
OTHER = SmokeFinding(check="reproduce", named={"step": 2}, words="so")
CAUGHT, BY_ANOTHER = Verdict.CAUGHT, Verdict.BY_ANOTHER
TABLE = {
    "all of it": ({"step": 2, "ranks": [1]}, (WATCH,), CAUGHT, True, ""),
    "beside others": ({"step": 2, "module": "layers.3"}, (OTHER, WATCH), CAUGHT, True, ""),
    "another step": ({"step": 3}, (WATCH,), CAUGHT, False, "step is 2 and must be 3"),
    "another rank": ({"step": 2, "ranks": [0]}, (WATCH,), CAUGHT, False, "ranks is [1] and must be [0]"),
    "one of two ranks": ({"ranks": [0, 1]}, (WATCH,), CAUGHT, False, "must be [0, 1]"),
    "what is not named": ({"tensor": "rows"}, (WATCH,), CAUGHT, False, "tensor is None"),
    "another check": ({"step": 2}, (OTHER,), BY_ANOTHER, None, "watch found nothing; reproduce did"),
    "nobody": ({"step": 2}, (), Verdict.MISSED, None, "no check found anything"),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_finding_is_held_to_its_row(name: str) -> None:
    wants, findings, verdict, named, said = TABLE[name]
    seen = judge_finding("watch", wants, findings)
    assert seen[:2] == (verdict, named)
    assert said in seen[2]
    assert bool(seen[2]) is not (named is True)


def new_row(
    verdict: Verdict, *, named: bool | None = None, elsewhere: bool = False, held_out: bool = False
) -> FaultResult:
    return FaultResult(
        fault="one", planted="nan:2", says="It is wrong.", cell="c", title="t", ranks=2, way="train", held_out=held_out,
        caught_by="watch", wants={"step": 2}, verdict=verdict, named=named, elsewhere=elsewhere,
    )  # fmt: skip


def new_score(faults: tuple[FaultResult, ...], clean: tuple[CleanResult, ...]) -> FaultScore:
    schema = "megacpp-validate/smoke-faults/1"
    return FaultScore(schema_id=schema, tool="t", target="cpu", environment="here", faults=faults, clean=clean)


GOOD = new_row(CAUGHT, named=True)
GREEN = CleanResult(cell="c", title="t", way="train", ending="done")
NOT_RUN = Verdict.NOT_RUN
SCORES = {
    "all is well": ((GOOD,), (GREEN,), False, False),
    "named wrongly": ((GOOD, new_row(CAUGHT, named=False)), (GREEN,), True, False),
    "by another": ((GOOD, new_row(BY_ANOTHER)), (GREEN,), True, False),
    "held out, by another": ((GOOD, new_row(BY_ANOTHER, held_out=True)), (GREEN,), False, False),
    "held out, missed": ((GOOD, new_row(Verdict.MISSED, held_out=True)), (GREEN,), True, False),
    "missed": ((new_row(Verdict.MISSED),), (GREEN,), True, False),
    "a false alarm": ((GOOD,), (GREEN.model_copy(update={"findings": (OTHER,)}),), True, False),
    "a clean run died": ((GOOD,), (GREEN.model_copy(update={"ending": "died"}),), True, False),
    "not run": ((GOOD, new_row(NOT_RUN)), (GREEN,), False, True),
    "of another target": ((GOOD, new_row(NOT_RUN, elsewhere=True)), (GREEN,), False, False),
    "of another target alone": ((new_row(NOT_RUN, elsewhere=True),), (), False, True),
    "nothing": ((), (), False, True),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_score_breaks_and_lacks(name: str) -> None:
    faults, clean, breaks, lacks = SCORES[name]
    score = new_score(faults, clean)
    assert (score.breaks, score.lacks) == (breaks, lacks)


def test_it_counts_what_is_caught_and_named() -> None:
    score = new_score((GOOD, new_row(CAUGHT, named=False), new_row(BY_ANOTHER), new_row(NOT_RUN)), (GREEN,))
    assert (score.right, len(score.judged), score.alarms) == (1, 3, (0, 1))
