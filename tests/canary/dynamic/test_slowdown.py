"""A slowdown is told from the noise of a card, and from what all modules share: by tables, and by simulated runs."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest

from megacpp_validate.canary.dynamic.slowdown import CardNoise, Slowness, compare_timings, measure_noise, split_slowness
from megacpp_validate.canary.dynamic.upgrade_result import TimingChange
from megacpp_validate.evidence.receipt import Machine, Outcome, Receipt, Timing, cell_id

H200 = Machine(host="node1", gpu="NVIDIA H200", driver="580.1")
# Uses of the seven modules, milliseconds on the device and on the host; None where nothing runs on the device.
USES: Mapping[str, Mapping[str, tuple[float | None, float]]] = {
    "imports": {"scope": (None, 1.2)},
    "attention": {"forward": (0.25, 0.33), "both": (1.07, 1.3)},
    "linear_walker": {"bf16": (0.6, 0.8), "fp8": (0.4, 0.9)},
    "expert_gemm": {"bf16": (0.7, 1.1), "fp8": (0.6, 1.4)},
    "permute": {"bf16": (0.35, 0.6)},
    "native_block": {"bf16": (1.9, 2.6), "fp8": (1.4, 2.9)},
    "layer_spec": {"bf16": (0.7, 0.9), "fp8": (0.5, 1.0)},
}
DEVICE, WALL = "cuda-events", "perf_counter"


@dataclass(frozen=True)
class Noise:
    """Deviations of logarithms: of a round, of a process, of a use within a process; and how much the host has more."""

    rounds: float = 0.01
    process: float = 0.005
    use: float = 0.004
    host: float = 3.0


def timing(name: str, clock: str, rounds: list[float]) -> Timing:
    median = statistics.median(rounds)
    return Timing(name, clock, tuple(rounds), median, (max(rounds) - min(rounds)) / median, 20)


def receipt(module: str, timings: tuple[Timing, ...], stack: str = "te2.12.0", machine: Machine = H200) -> Receipt:
    cell = cell_id(stack, "h200", module)
    return Receipt(cell, stack, "h200", module, Outcome.PASS, "", "te", machine=machine, timings=timings)


def simulate(
    dice: random.Random,
    noise: Noise,
    slower: Mapping[str, float] | None = None,
    *,
    stack: str = "te2.12.0",
    modules: tuple[str, ...] = tuple(USES),
) -> dict[str, Receipt]:
    """Receipts of one run: every module is a process with a speed of its own; lognormal throughout."""
    made = {}
    for module in modules:
        factor = (slower or {}).get(module, 1.0)
        rows = []
        speeds = {clock: dice.gauss(0, noise.process * more) for clock, more in ((DEVICE, 1.0), (WALL, noise.host))}
        for name, (device, host) in USES[module].items():
            for suffix, clock, base, more in (("", DEVICE, device, 1.0), (".host", WALL, host, noise.host)):
                if base is None:
                    continue
                middle = math.log(base * factor) + speeds[clock] + dice.gauss(0, noise.use * more)
                rounds = [math.exp(middle + dice.gauss(0, noise.rounds * more)) for _ in range(5)]
                rows.append(timing(name + suffix, clock, rounds))
        made[module] = receipt(module, tuple(rows), stack)
    return made


def grid(
    seed: int, noise: Noise, slower: Mapping[str, float] | None = None, modules: tuple[str, ...] = tuple(USES)
) -> tuple[TimingChange, ...]:
    """A stack run twice, and the next one."""
    dice = random.Random(seed)
    first, again = (simulate(dice, noise, modules=modules) for _ in range(2))
    after = simulate(dice, noise, slower, stack="te2.14.1", modules=modules)
    return compare_timings(first, after, measure_noise(first, again))


def slow_modules(changes: tuple[TimingChange, ...]) -> set[str]:
    return {change.module for change in split_slowness(changes).own}


# --- noise is no slowdown ---------------------------------------------------------------------------------------------

QUIET = Noise(0.003, 0.002, 0.002)
USUAL = Noise()
ROUGH = Noise(0.03, 0.01, 0.01)
DRIFTING = Noise(0.004, 0.02, 0.005)  # rounds agree and processes do not: what rounds alone cannot tell


@pytest.mark.thorough
@pytest.mark.parametrize("noise", [QUIET, USUAL, ROUGH, DRIFTING], ids=["quiet", "usual", "rough", "drifting"])
@pytest.mark.parametrize("modules", [tuple(USES), ("attention",), ("permute", "attention")], ids=["all", "one", "two"])
def test_a_stack_beside_itself_is_slower_in_less_than_one_use_of_a_thousand(
    noise: Noise, modules: tuple[str, ...], record_property: Callable[[str, object], None]
) -> None:
    grids = 4000 // len(USES) if len(modules) > 2 else 2000
    found = [change for seed in range(grids) for change in grid(seed, noise, modules=modules)]
    alarms = sum(change.slower for change in found)
    record_property("false alarms", f"{alarms} of {len(found)} uses")
    assert alarms / len(found) < 0.001


# --- a slowdown is found ----------------------------------------------------------------------------------------------


def draws(number: int, low: float, high: float) -> list[tuple[int, float]]:
    """Seeds, and factors that are even on a logarithmic scale: the same ones at every run."""
    dice = random.Random(number)
    return [(seed, math.exp(dice.uniform(math.log(low), math.log(high)))) for seed in range(number)]


def test_the_module_that_became_slower_is_named_and_no_other() -> None:
    modules = sorted(USES.keys() - {"imports"})
    wrong = 0
    for seed, factor in draws(300, 1.3, 50.0):
        module = modules[seed % len(modules)]
        changes = grid(seed, USUAL, {module: factor})
        wrong += slow_modules(changes) != {module}
        device = [change for change in changes if change.module == module and not change.name.endswith(".host")]
        assert all(change.slower and change.noise < change.ratio for change in device)
    assert wrong <= 3  # a use of the host's, once in a hundred grids


def test_what_only_the_host_does_longer_is_found() -> None:
    """Time that the device does not see: the row of the host tells it, and the row of the device does not."""
    dice = random.Random(5)
    first, again, after = (simulate(dice, USUAL) for _ in range(3))
    rows = tuple(
        timing(row.name, row.clock, [value + 1.0 for value in row.rounds_ms]) if row.clock == WALL else row
        for row in after["attention"].timings
    )
    after["attention"] = replace(after["attention"], timings=rows)
    own = split_slowness(compare_timings(first, after, measure_noise(first, again))).own
    assert {(change.module, change.name) for change in own} == {
        ("attention", "forward.host"),
        ("attention", "both.host"),
    }


# --- what all share ---------------------------------------------------------------------------------------------------


def test_a_clock_that_was_lowered_is_nobodys_fault() -> None:
    blamed = 0
    for seed, factor in draws(300, 1.05, 3.0):
        found = split_slowness(grid(seed, USUAL, dict.fromkeys(USES, factor)))
        blamed += bool(found.own)
        if factor > 1.15:
            assert found.shared[0].factor == pytest.approx(factor, rel=0.05)
            assert len(found.shared[0].modules) == 6  # nothing of `imports` runs on the device
            assert "6 of 6 modules" in found.shared[0].summary
    assert blamed <= 3  # once in a hundred grids, at factors that barely leave the noise


def test_a_module_that_does_not_follow_the_clock_leaves_the_rest_shared() -> None:
    slower = {module: 1.3 for module in USES if module != "permute"}
    found = split_slowness(grid(1, USUAL, slower))
    assert not found.own
    assert "permute" not in found.shared[0].modules


def test_what_is_slower_beyond_the_shared_factor_is_its_modules_own() -> None:
    slower = dict.fromkeys(USES, 1.3) | {"attention": 2.6}
    found = split_slowness(grid(2, USUAL, slower))
    assert {change.module for change in found.own} == {"attention"}
    assert found.shared


def test_what_two_modules_are_spared_is_not_shared() -> None:
    """All that multiplies matrices became slower, the rest did not: those modules, not the machine."""
    slower = dict.fromkeys(("linear_walker", "expert_gemm", "native_block", "layer_spec"), 1.4)
    found = split_slowness(grid(4, USUAL, slower))
    assert {change.module for change in found.own} == set(slower)
    assert not found.shared


def test_what_some_uses_of_every_module_are_spared_is_not_shared() -> None:
    """FP8 became slower everywhere and bf16 did not: no clock does that."""
    dice, modules = random.Random(6), ("linear_walker", "expert_gemm", "native_block", "layer_spec")
    first, again, after = (simulate(dice, USUAL, modules=modules) for _ in range(3))
    for module in modules:
        rows = tuple(
            timing(row.name, row.clock, [value * 1.6 for value in row.rounds_ms]) if row.name[:3] == "fp8" else row
            for row in after[module].timings
        )
        after[module] = replace(after[module], timings=rows)
    found = split_slowness(compare_timings(first, after, measure_noise(first, again)))
    assert not found.shared
    assert {(change.module, change.name) for change in found.own} >= {(module, "fp8") for module in modules}


def test_two_modules_are_not_all() -> None:
    found = split_slowness(grid(4, USUAL, {"attention": 1.5, "permute": 1.5}, ("attention", "permute")))
    assert {change.module for change in found.own} == {"attention", "permute"}


# --- where nothing can be said ----------------------------------------------------------------------------------------


def one(
    rounds: list[float], *, machine: Machine = H200, name: str = "use", stack: str = "te2.12.0"
) -> dict[str, Receipt]:
    return {"attention": receipt("attention", (timing(name, DEVICE, rounds),), stack, machine)}


STEADY = [1.0, 1.001, 1.002, 0.999, 1.0]
TWICE = [2.0, 2.01, 1.99, 2.0, 2.0]
ELSEWHERE = replace(H200, host="node2")
UNKNOWN: dict[str, tuple[dict[str, Receipt], dict[str, Receipt], CardNoise, str]] = {
    "another host": (one(STEADY), one(TWICE, machine=ELSEWHERE), measure_noise(one(STEADY), one(STEADY)), "now on"),
    "another driver": (
        one(STEADY), one(TWICE, machine=replace(H200, driver="590")), measure_noise(one(STEADY), one(STEADY)), "590",
    ),
    "no second run, time of the host": (
        {"attention": receipt("attention", (timing("use", WALL, STEADY),))},
        {"attention": receipt("attention", (timing("use", WALL, TWICE),))}, measure_noise(one(STEADY), {}), "run twice",
    ),
    "noise of another card": (
        one(STEADY), one(TWICE),
        measure_noise(one(STEADY, machine=ELSEWHERE), one(STEADY, machine=ELSEWHERE)), "run twice",
    ),
    "two runs on two cards": (
        one(STEADY), one(TWICE), measure_noise(one(STEADY), one(STEADY, machine=ELSEWHERE)), "run twice",
    ),
    "two stacks are no second run": (
        one(STEADY), one(TWICE), measure_noise(one(STEADY), one(STEADY, stack="te2.14.1")), "run twice",
    ),
    "too few rounds": (one(STEADY), one([2.0, 2.0]), measure_noise(one(STEADY), one(STEADY)), "rounds"),
    # As receipts of an H200 had it, 2026-11-21: the device went on before the host had launched the round.
    "rounds that lie apart on a device": (
        one(STEADY), one([2.0, 2.5, 2.0, 2.0, 2.0]), measure_noise(one(STEADY), one(STEADY)), "lie 25% apart",
    ),
    "two clocks": (
        one(STEADY), {"attention": receipt("attention", (timing("use", "cuda-events, not held", TWICE),))},
        measure_noise(one(STEADY), one(STEADY)), "timed by cuda-events, now by cuda-events, not held",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after", "noise", "words"), UNKNOWN.values(), ids=UNKNOWN)
def test_without_the_noise_of_this_card_nothing_is_slower_and_the_row_says_why(
    before: dict[str, Receipt], after: dict[str, Receipt], noise: CardNoise, words: str
) -> None:
    (row,) = compare_timings(before, after, noise)
    assert (row.slower, row.noise, row.ratio) == (False, 0.0, 2.0)
    assert row.derivation.startswith("not compared")
    assert words in row.derivation
    assert split_slowness((row,)) == Slowness((), ())


@pytest.mark.parametrize(("ratio", "slower"), [(1.03, False), (1.15, False), (1.19, False), (1.22, True), (2.0, True)])
def test_where_nothing_was_run_twice_device_time_is_held_to_what_is_believed_of_any_card(
    ratio: float, slower: bool
) -> None:
    """exp(8.610 x 0.015 x sqrt(2)) = 1.200: Student's t of four degrees of freedom, beyond which one in 2000 is."""
    others = {name: receipt(name, (timing("use", DEVICE, STEADY),)) for name in ("permute", "expert_gemm")}
    after = one([value * ratio for value in STEADY])
    noise = measure_noise(one(STEADY), {})
    rows = {row.module: row for row in compare_timings(one(STEADY) | others, after | others, noise)}
    row = rows["attention"]
    assert row.slower is slower
    assert row.noise == pytest.approx(math.exp(8.610 * 0.015 * math.sqrt(2.0)))
    assert "0 modules run twice" in row.derivation
    # Two modules cannot tell a card with a lower clock from a slower module.
    two = {name: others[name] for name in ("permute",)}
    rows = {row.module: row for row in compare_timings(one(STEADY) | two, after | two, noise)}
    assert not rows["attention"].slower
    assert rows["attention"].derivation.startswith("not compared")


@pytest.mark.parametrize("rounds", [[0.0] * 5, [math.nan] * 5, [1.0, 2.0, math.inf, 1.0, 1.0], [-1.0] * 5])
def test_times_that_are_none_are_no_row(rounds: list[float]) -> None:
    noise = measure_noise(one(STEADY), one(STEADY))
    broken = {"attention": receipt("attention", (Timing("use", DEVICE, tuple(rounds), rounds[0], 0.0, 1),))}
    assert compare_timings(broken, one(STEADY), noise) == compare_timings(one(STEADY), broken, noise) == ()
    assert measure_noise(one(STEADY), broken).spreads == {}


def test_only_what_was_timed_on_both_sides_by_one_clock_is_compared() -> None:
    noise = measure_noise(one(STEADY), one(STEADY))
    assert compare_timings(one(STEADY), one(STEADY, name="other"), noise) == ()
    assert compare_timings({}, one(STEADY), noise) == compare_timings(one(STEADY), {}, noise) == ()
    by_wall = {"attention": receipt("attention", (timing("use", WALL, STEADY),))}
    (row,) = compare_timings(one(STEADY), by_wall, noise)
    assert (row.slower, row.noise, row.derivation.startswith("not compared")) == (False, 0.0, True)


# --- each part of the bound can decide --------------------------------------------------------------------------------


def test_one_long_round_of_before_is_doubt_enough() -> None:
    noise = measure_noise(one(STEADY), one(STEADY))
    (clear,) = compare_timings(one(STEADY), one(TWICE), noise)
    assert clear.slower
    (row,) = compare_timings(one([1.0, 1.0, 2.1, 1.0, 1.0]), one(TWICE), noise)
    assert not row.slower


def test_the_bound_comes_from_what_is_largest_and_says_so() -> None:
    steady = measure_noise(one(STEADY), one(STEADY))
    apart = measure_noise(one(STEADY), one([value * 3.0 for value in STEADY]))
    rough = [1.0, 1.09, 0.91, 1.05, 0.95]
    short = [value / 1e5 for value in STEADY]
    rows = {
        "two processes of one stack": compare_timings(one(STEADY), one(STEADY), steady),
        "rounds differ by": compare_timings(one(rough), one(rough), steady),
        "resolution of the clock": compare_timings(one(short), one(short), measure_noise(one(short), one(short))),
    }
    for words, (row,) in rows.items():
        assert words in row.derivation
    (row,) = compare_timings(one(STEADY), one(TWICE), apart)
    assert row.noise > 3.0
    assert not row.slower
