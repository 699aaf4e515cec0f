"""The search against planted culprits; a point judged by receipts, by sources, and by what was loaded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
from megacpp_validate.evidence.receipt import Failure, Library, Outcome, Package, Receipt

BAD, GOOD, UNBUILT, UNTOLD = Verdict.BAD, Verdict.GOOD, Verdict.CANNOT_BUILD, Verdict.CANNOT_TELL
NAMES = ("te", "cudnn", "torch", "flash-attn")


@dataclass
class Truth:
    """Bad where any culprit, a set of axes with a value each, is reached; some points give no answer."""

    culprits: tuple[dict[int, int], ...]
    untold: Callable[[tuple[int, ...]], Verdict | None] = lambda _: None
    runs: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def __call__(self, choices: Mapping[str, str]) -> Answer:
        point = tuple(int(value[1:]) for value in choices.values())
        self.runs[point] += 1
        untold = self.untold(point)
        if untold is UNBUILT:
            raise NoEnvironment(f"no environment at {point}")
        if untold:
            return Answer(verdict=untold, reason=f"{untold.value} at {point}")
        bad = any(all(point[axis] >= turn for axis, turn in one.items()) for one in self.culprits)
        return Answer(verdict=BAD if bad else GOOD, reason="seen")


def find(sizes: Sequence[int], truth: Truth) -> BisectResult:
    axes = {name: tuple(f"v{number}" for number in range(size)) for name, size in zip(NAMES, sizes, strict=False)}
    return search(axes, truth, BisectOptions("v0", "v9", "attention", static=False))


@pytest.mark.parametrize("size", [2, 3, 30])
def test_every_culprit_of_a_row_of_releases_is_found_in_few_runs(size: int) -> None:
    for turn in range(1, size):
        truth = Truth(({0: turn},))
        found = find([size], truth)
        assert (found.last_good, found.first_bad) == ({"te": f"v{turn - 1}"}, ({"te": f"v{turn}"},))
        assert (found.end, found.exit) == (SearchEnd.FOUND, Exit.CLOSED)
        assert sum(truth.runs.values()) == len(found.points) <= math.ceil(math.log2(size)) + 2


ENDS: list[tuple[dict[tuple[int, ...], Verdict], tuple[dict[int, int], ...], SearchEnd, Exit, int]] = [
    ({}, ({0: 0},), SearchEnd.GOOD_IS_BAD, Exit.WRONG_ARGUMENTS, 1),
    ({}, (), SearchEnd.BAD_IS_GOOD, Exit.WRONG_ARGUMENTS, 2),
    ({(0,): UNBUILT}, ({0: 3},), SearchEnd.END_UNBUILT, Exit.NO_ENVIRONMENT, 1),
    ({(0,): UNTOLD}, ({0: 3},), SearchEnd.END_UNTOLD, Exit.EVIDENCE_MISSING, 1),
    ({(9,): UNBUILT}, ({0: 3},), SearchEnd.END_UNBUILT, Exit.NO_ENVIRONMENT, 2),
    ({(9,): UNTOLD}, ({0: 3},), SearchEnd.END_UNTOLD, Exit.EVIDENCE_MISSING, 2),
]


@pytest.mark.parametrize(("untold", "culprits", "end", "code", "points"), ENDS)
def test_ends_that_are_not_as_given_end_the_search(
    untold: dict[Any, Verdict], culprits: Any, end: SearchEnd, code: Exit, points: int
) -> None:
    found = find([10], Truth(culprits, untold.get))
    assert (found.end, found.exit, found.culprits, len(found.points)) == (end, code, {}, points)
    assert found.points[-1].reason


# Sizes of the axes, culprits, the axis that is found with its last good and first bad value, the values of the others.
AXES: dict[str, tuple[list[int], tuple[dict[int, int], ...], tuple[str, str, str], dict[str, str]]] = {
    "one of two": ([10, 5], ({1: 3},), ("cudnn", "v2", "v3"), {"te": "v9"}),
    "the last of four": (
        [3, 4, 2, 9],
        ({3: 8},),
        ("flash-attn", "v7", "v8"),
        {"te": "v2", "cudnn": "v3", "torch": "v1"},
    ),
    "each alone: the first that is moved": ([30, 9], ({0: 17}, {1: 3}), ("te", "v16", "v17"), {"cudnn": "v0"}),
    "two together: the second": ([10, 5], ({0: 6, 1: 2},), ("cudnn", "v1", "v2"), {"te": "v9"}),
    "an axis that does not change": ([1, 7], ({1: 3},), ("cudnn", "v2", "v3"), {"te": "v0"}),
}


@pytest.mark.parametrize(("sizes", "culprits", "turn", "held"), AXES.values(), ids=AXES)
def test_the_axis_is_found_and_where_along_it(
    sizes: list[int], culprits: tuple[dict[int, int], ...], turn: tuple[str, str, str], held: dict[str, str]
) -> None:
    truth = Truth(culprits)
    found = find(sizes, truth)
    axis, good, bad = turn
    assert (found.culprits, found.end) == ({axis: (bad,)}, SearchEnd.FOUND)
    assert (found.last_good, found.first_bad) == (held | {axis: good}, (held | {axis: bad},))
    assert max(truth.runs.values()) == 1


@pytest.mark.parametrize("kind", [UNBUILT, UNTOLD])
@pytest.mark.parametrize(("turn", "dark"), [(5, {4, 5, 6}), (20, set(range(10, 20))), (1, {1}), (28, {3, 27, 28})])
def test_releases_without_an_answer_widen_the_range_and_never_move_it(turn: int, dark: set[int], kind: Verdict) -> None:
    found = find([30], Truth(({0: turn},), lambda point: kind if point[0] in dark else None))
    last = max(value for value in range(turn) if value not in dark)
    first = min(value for value in range(turn, 30) if value not in dark)
    assert found.last_good == {"te": f"v{last}"}
    assert found.culprits == {"te": tuple(f"v{value}" for value in range(last + 1, first + 1))}
    reasons = {point.point["te"]: point.reason for point in found.points}
    assert all(reasons[f"v{value}"] for value in range(last + 1, first))
    closed = first == last + 1
    assert (found.end, found.exit) == (
        (SearchEnd.FOUND, Exit.CLOSED) if closed else (SearchEnd.NARROWED, Exit.EVIDENCE_MISSING)
    )


def test_a_mix_without_an_answer_leaves_both_axes() -> None:
    # A new Transformer Engine does not import with the old cuDNN.
    found = find([10, 2], Truth(({0: 6},), lambda p: UNTOLD if (p[0] > 4) != (p[1] > 0) else None))
    assert found.culprits == {"te": ("v5", "v6", "v7", "v8", "v9"), "cudnn": ("v1",)}
    assert found.last_good == {"te": "v4", "cudnn": "v0"}
    assert found.end is SearchEnd.NARROWED


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
    answer = judge_receipts("attention", ("imports",), [receipt("imports", below), receipt("attention", own)], {})
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
    assert judge_receipts("attention", (), [own], {"te": "2.17.1"}).verdict is verdict


@pytest.mark.parametrize(
    ("axis", "wanted", "loaded", "verdict"),
    [
        ("cudnn", "9.14.0", Library("libcudnn", "9.14.0"), Verdict.GOOD),
        ("cudnn", "9.14.0.64", Library("libcudnn", "9.14.0"), Verdict.GOOD),
        ("cudnn", "9.21.0", Library("libcudnn", "9.14.0"), Verdict.CANNOT_TELL),
        ("cudnn", "9.1", Library("libcudnn", "9.14.0"), Verdict.CANNOT_TELL),
        ("cudnn", "9.21.0", Library("libcudnn", "9.14.0, 9.21.0"), Verdict.CANNOT_TELL),
        ("cudnn", "9.21.0", Library("libcudnn", ""), Verdict.GOOD),
        ("cudnn", "9.21.0", Library("libcublas", "13.1.0"), Verdict.GOOD),
        ("torch", "2.11.0", Package("torch", "2.11.0+cu130", "f"), Verdict.GOOD),
        ("torch", "2.11.0", Package("torch", "2.13.0", "f"), Verdict.CANNOT_TELL),
        ("te", "2.17.1", Package("transformer_engine", "2.20.2", "f"), Verdict.CANNOT_TELL),
        ("my-kernels", "3", Package("my_kernels", "4", "f"), Verdict.CANNOT_TELL),
    ],
)
def test_a_point_that_loaded_something_else_says_nothing(
    axis: str, wanted: str, loaded: Library | Package, verdict: Verdict
) -> None:
    place = "libraries" if isinstance(loaded, Library) else "packages"
    seen = receipt("attention", **{place: (loaded,)})
    answer = judge_receipts("attention", (), [seen], {axis: wanted})
    assert answer.verdict is verdict
    assert verdict is Verdict.GOOD or f"{axis} {wanted} was to be loaded" in answer.reason
