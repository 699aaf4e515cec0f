"""The search against planted culprits; a point judged by receipts, by sources, and by what was loaded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from megacpp_validate.canary.dynamic.bisect import (
    Answer,
    BisectOptions,
    BisectResult,
    SearchEnd,
    Verdict,
    judge_receipts,
    search,
)
from megacpp_validate.errors import Exit, NoEnvironment
from megacpp_validate.evidence.receipt import Failure, Outcome, Package, Receipt

BAD, GOOD, UNBUILT, UNTOLD = Verdict.BAD, Verdict.GOOD, Verdict.CANNOT_BUILD, Verdict.CANNOT_TELL


@dataclass
class Truth:
    """Bad from one release on; some releases give no answer."""

    turn: int
    untold: Callable[[int], Verdict | None] = lambda _: None
    runs: Counter[int] = field(default_factory=Counter)

    def __call__(self, release: str) -> Answer:
        number = int(release[1:])
        self.runs[number] += 1
        untold = self.untold(number)
        if untold is UNBUILT:
            raise NoEnvironment(f"no environment of {release}")
        if untold:
            return Answer(verdict=untold, reason=f"{untold.value} at {release}")
        return Answer(verdict=BAD if number >= self.turn else GOOD, reason="seen")


def find(size: int, truth: Truth) -> BisectResult:
    releases = [f"v{number}" for number in range(size)]
    return search(releases, truth, BisectOptions("v0", "v9", "attention", static=False))


@pytest.mark.parametrize("size", [2, 3, 30])
def test_every_culprit_of_a_row_of_releases_is_found_in_few_runs(size: int) -> None:
    for turn in range(1, size):
        truth = Truth(turn)
        found = find(size, truth)
        assert (found.last_good, found.first_bad) == (f"v{turn - 1}", (f"v{turn}",))
        assert (found.end, found.exit) == (SearchEnd.FOUND, Exit.CLOSED)
        assert sum(truth.runs.values()) == len(found.points) <= math.ceil(math.log2(size)) + 2


ENDS: list[tuple[dict[int, Verdict], int, SearchEnd, Exit, int]] = [
    ({}, 0, SearchEnd.GOOD_IS_BAD, Exit.WRONG_ARGUMENTS, 1),
    ({}, 10, SearchEnd.BAD_IS_GOOD, Exit.WRONG_ARGUMENTS, 2),
    ({0: UNBUILT}, 3, SearchEnd.END_UNBUILT, Exit.NO_ENVIRONMENT, 1),
    ({0: UNTOLD}, 3, SearchEnd.END_UNTOLD, Exit.EVIDENCE_MISSING, 1),
    ({9: UNBUILT}, 3, SearchEnd.END_UNBUILT, Exit.NO_ENVIRONMENT, 2),
    ({9: UNTOLD}, 3, SearchEnd.END_UNTOLD, Exit.EVIDENCE_MISSING, 2),
]


@pytest.mark.parametrize(("untold", "turn", "end", "code", "points"), ENDS)
def test_ends_that_are_not_as_given_end_the_search(
    untold: dict[Any, Verdict], turn: int, end: SearchEnd, code: Exit, points: int
) -> None:
    found = find(10, Truth(turn, untold.get))
    assert (found.end, found.exit, found.first_bad, len(found.points)) == (end, code, (), points)
    assert found.points[-1].reason


@pytest.mark.parametrize("kind", [UNBUILT, UNTOLD])
@pytest.mark.parametrize(("turn", "dark"), [(5, {4, 5, 6}), (20, set(range(10, 20))), (1, {1}), (28, {3, 27, 28})])
def test_releases_without_an_answer_widen_the_range_and_never_move_it(turn: int, dark: set[int], kind: Verdict) -> None:
    found = find(30, Truth(turn, lambda number: kind if number in dark else None))
    last = max(value for value in range(turn) if value not in dark)
    first = min(value for value in range(turn, 30) if value not in dark)
    assert (found.last_good, found.first_bad) == (
        f"v{last}",
        tuple(f"v{value}" for value in range(last + 1, first + 1)),
    )
    closed = first == last + 1
    assert (found.end, found.exit) == (
        (SearchEnd.FOUND, Exit.CLOSED) if closed else (SearchEnd.NARROWED, Exit.EVIDENCE_MISSING)
    )


def receipt(probe: str, outcome: Outcome = Outcome.PASS, **more: object) -> Receipt:
    one = Receipt(f"te1-h200-{probe}", "te1", "h200", probe, outcome, f"{probe} is {outcome.value}", "te")
    return replace(one, **more)  # type: ignore[arg-type]


PASS, ERROR, IMPORT = Outcome.PASS, Outcome.ERROR, Outcome.IMPORT_ERROR
OUTCOMES = [
    (PASS, PASS, GOOD), (Outcome.EXPECTED_UNSUPPORTED, PASS, GOOD), (PASS, ERROR, GOOD), (Outcome.FAIL, PASS, BAD),
    (ERROR, PASS, BAD), (ERROR, ERROR, BAD), (Outcome.TIMEOUT, PASS, BAD), (IMPORT, PASS, BAD),
    (IMPORT, IMPORT, UNTOLD), (Outcome.BLOCKED, IMPORT, UNTOLD), (Outcome.NOT_RUN, PASS, UNTOLD),
]  # fmt: skip


@pytest.mark.parametrize(("own", "below", "verdict"), OUTCOMES)
def test_every_outcome_has_a_verdict(own: Outcome, below: Outcome, verdict: Verdict) -> None:
    answer = judge_receipts("attention", ("imports",), [receipt("imports", below), receipt("attention", own)], "1")
    assert answer.verdict is verdict
    assert answer.reason


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"requested": "native", "requested_because": "MEGACPP_DISABLE_TE=1 turns it off"}, UNTOLD),
        ({"failure": Failure("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 64.00 MiB")}, UNTOLD),
        ({"failure": Failure("OSError", "[Errno 28] No space left on device")}, UNTOLD),
        ({"failure": Failure("SIGKILL", "nothing")}, UNTOLD),
        ({"failure": Failure("SIGSEGV", "nothing")}, BAD),
        ({"failure": Failure("RuntimeError", "CUDA error: an illegal memory access was encountered")}, BAD),
    ],
)
def test_what_the_machine_or_the_user_does_is_no_fault_of_a_release(changes: dict[str, Any], verdict: Verdict) -> None:
    own = receipt("attention", Outcome.ERROR, **changes)
    assert judge_receipts("attention", (), [own], "2.17.1").verdict is verdict


@pytest.mark.parametrize(
    ("loaded", "verdict"), [("2.17.1", GOOD), ("2.17.1+abc", GOOD), ("", GOOD), ("2.20.2", UNTOLD)]
)
def test_a_point_that_loaded_another_release_says_nothing(loaded: str, verdict: Verdict) -> None:
    seen = receipt("attention", packages=(Package("transformer_engine", loaded, "f"),))
    answer = judge_receipts("attention", (), [seen], "2.17.1")
    assert answer.verdict is verdict
    assert verdict is GOOD or "2.17.1 was to be loaded" in answer.reason
