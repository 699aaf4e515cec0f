"""Norms of parts: what is scaled, flushed or zeroed in one is told by its name; what differs as seeds do is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from megacpp_validate.evidence.loss_curve import LossCurve
from megacpp_validate.gate.loss_norms import CAP, FEWEST, LATER, MATCHED, check_norms
from tests.gate.small_curves import STEPS, make_pairs

FACTOR = 4.303 * math.sqrt(2)
FIRST = STEPS // 20
PARTS = {"layers.3": 2.0, "quiet": 2.0**-20}
Norms = Callable[[int, float], float]  # of a step, what it was


def pairs(change: dict[str, Norms] | None = None, apart: float = 0.0) -> list[tuple[LossCurve, LossCurve]]:
    """Pairs whose parts have the same norms but for what is changed, and in BF16 a factor from seed to seed."""

    def norms(part: str, seed: int) -> list[float]:
        return [PARTS[part] * math.exp(seed * apart) * (1 + step % 7 / 64) for step in range(STEPS)]

    made = []
    for bf16, fp8 in zip(*make_pairs(), strict=True):
        own = {part: norms(part, bf16.seed) for part in PARTS}
        seen = {
            part: [(change or {}).get(part, lambda _, norm: norm)(step, norm) for step, norm in enumerate(values)]
            for part, values in own.items()
        }
        made.append((replace(bf16, part_norms=_frozen(own)), replace(fp8, part_norms=_frozen(seen))))
    return made


def _frozen(parts: dict[str, list[float]]) -> dict[str, tuple[float, ...]]:
    return {part: tuple(values) for part, values in parts.items()}


def failed(made: Sequence[tuple[LossCurve, LossCurve]], matched: int = FIRST) -> dict[str, str]:
    return {check.name: check.detail for check in check_norms(made, STEPS, matched, FACTOR) if not check.passed}


def test_equal_norms_pass_and_every_check_is_made() -> None:
    checks = list(check_norms(pairs(), STEPS, FIRST, FACTOR))
    assert [check.name for check in checks] == [
        "gradient_norm.matched", "gradient_norm.later", "part_norm.first", "part_norm.matched", "part_norm.later",
    ]  # fmt: skip
    assert all(check.passed for check in checks)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("factor", [0.0, 0.4, 2.5])
def test_a_part_that_is_zeroed_or_scaled_is_named(part: str, factor: float) -> None:
    said = failed(pairs({part: lambda _, norm: factor * norm}))
    assert set(said) == {"part_norm.matched", "part_norm.later" if factor == 0.0 else "part_norm.first"}
    assert all(part in detail for detail in said.values())


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("factor", "fails"), [(0.0, True), (1 / 17, True), (17.0, True), (1 / 15, False), (15.0, False)]
)
def test_a_part_that_vanishes_or_blows_up_late_fails_late(part: str, factor: float, fails: bool) -> None:
    said = failed(pairs({part: lambda step, norm: norm if step < 80 else factor * norm}))
    assert set(said) == ({"part_norm.later"} if fails else set())


def test_one_seed_is_enough() -> None:
    made = pairs({"quiet": lambda _, norm: 0.0 * norm})
    healthy = pairs()
    said = failed([healthy[0], made[1], healthy[2]])
    assert len(said) == 2
    assert all("seed 1" in detail for detail in said.values())


def test_bars_follow_the_spread_of_seeds_between_their_ends() -> None:
    def found(size: float, apart: float = 0.0) -> set[str]:
        scaled: Norms = lambda step, norm: norm * math.exp(size * (step >= FEWEST))  # noqa: E731
        return set(failed(pairs({"quiet": scaled}, apart), matched=4 * FEWEST))

    assert found(0.99 * MATCHED) == set()
    assert found(1.01 * MATCHED) == {"part_norm.matched"}
    apart = 0.05  # its sample deviation over seeds 0, 1, 2 is the same
    assert found(0.99 * FACTOR * apart, apart) == set()
    assert found(1.01 * FACTOR * apart, apart) == {"part_norm.matched"}
    assert found(0.99 * CAP, apart=9.0) == set()
    assert found(1.01 * CAP, apart=9.0) == {"part_norm.matched"}


@pytest.mark.parametrize(("size", "fails"), [(0.99 * LATER, False), (1.01 * LATER, True), (-1.01 * LATER, True)])
def test_where_weights_are_the_same_seeds_that_differ_buy_no_room(size: float, fails: bool) -> None:
    """The same in both runs of each seed; scaled from the first step on, in one seed or in all of them."""
    made = pairs({"quiet": lambda _, norm: norm * math.exp(size)}, apart=9.0)
    assert set(failed(made, matched=10 * FEWEST)) == ({"part_norm.first"} if fails else set())
    healthy = pairs(apart=9.0)
    assert set(failed([healthy[0], made[1], healthy[2]])) == ({"part_norm.first"} if fails else set())


def test_a_part_that_one_run_did_not_record_fails() -> None:
    made = pairs()
    bf16, fp8 = made[1]
    made[1] = bf16, replace(fp8, part_norms={"quiet": fp8.part_norms["quiet"]})
    assert failed(made) == {"part_norm.recorded": "not every run recorded layers.3"}


def test_norms_that_are_no_numbers_fail() -> None:
    """They never come this far in a run: `steps` fails first."""
    assert set(failed(pairs({"quiet": lambda step, norm: math.nan if step >= 50 else norm}))) == {"part_norm.later"}
