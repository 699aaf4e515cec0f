"""The stopwatch, by a clock that is wound by hand and by a real one: interleaved rounds, medians, and what raises."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_validate.evidence.receipt import Timing
from megacpp_validate.probes import speeds as module
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.order import Order, Target
from megacpp_validate.probes.speeds import (
    FEWEST_USES,
    FIRST_USES,
    MOST_USES,
    ROUNDS,
    CudaClock,
    HostClock,
    Stopwatch,
    Use,
)

pytestmark = pytest.mark.usefixtures("what_is_old_rests")
CPU = Target("cpu", "")


def new_bench(requested: str = "native") -> Bench:
    return Bench(Order("fake", "native", CPU, requested))


class HandClock(HostClock):
    """A device whose times are written down: each use takes what `ms` says of it; the host's clock moves with it."""

    name = "cuda-events"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.launched, self.asked = 0.0, 0.0, list[tuple[int, float]]()
        self.holds = True
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)

    def wait(self) -> None:
        self.now += self.launched
        self.launched = 0.0

    def device_ms(self, call: Callable[[], Any], uses: int, launch_ms: float) -> tuple[list[float], bool]:
        self.asked.append((uses, launch_ms))
        found = []
        for _ in range(uses):
            call()
            found.append(self.launched * 1e3)
            self.launched = 0.0
        return found, self.holds

    def use(self, device_ms: float | Callable[[], float], host_ms: float, calls: list[str], name: str) -> Use:
        def call() -> Any:
            calls.append(name)
            self.now += host_ms / 1e3
            self.launched += (device_ms() if callable(device_ms) else device_ms) / 1e3

        return Use(call)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    return HandClock(monkeypatch)


def by_name(rows: tuple[Timing, ...]) -> dict[str, Timing]:
    return {row.name: row for row in rows}


def failed(bench: Bench) -> dict[str, str]:
    return {check.name: check.detail for check in bench.checks if not check.passed}


def test_a_use_has_a_row_of_device_time_and_one_of_the_host(clock: HandClock) -> None:
    bench = new_bench()
    watch = Stopwatch(bench, clock)
    watch.add("bf16.forward", lambda: clock.use(2.0, 0.5, [], "a"))
    rows = by_name(watch.run())
    assert list(rows) == ["bf16.forward", "bf16.forward.host"]
    device, host = rows.values()
    assert (device.clock, host.clock) == ("cuda-events", "perf_counter")
    assert device.rounds_ms == (2.0,) * ROUNDS
    assert host.rounds_ms == pytest.approx((2.5,) * ROUNDS)
    assert (device.uses, host.uses) == (10, 4)
    assert [(check.name, check.passed) for check in bench.checks] == [("speed.bf16.forward.ran", True)]
    assert all(launch == pytest.approx(0.5) for _, launch in clock.asked)


def test_rounds_of_all_uses_are_interleaved(clock: HandClock) -> None:
    calls: list[str] = []
    watch = Stopwatch(new_bench(), clock)
    for name in ("a", "b"):
        watch.add(name, lambda name=name: clock.use(40.0, 0.1, calls, name))
    assert calls == ["a"] * FIRST_USES + ["b"] * FIRST_USES
    calls.clear()
    watch.run()
    turns = [name for index, name in enumerate(calls) if not index or calls[index - 1] != name]
    assert turns == ["a", "b"] * (ROUNDS + 1)  # once to count, then the rounds


def test_a_row_is_the_median_of_every_round_and_their_spread(clock: HandClock) -> None:
    """One use in each round takes ten times as long, and one round as a whole twice as long."""
    done = iter(range(10_000))

    def device_ms() -> float:
        number = next(done)
        if number < FIRST_USES + 4:
            return 4.0
        step = number - FIRST_USES - 4
        turn, place = divmod(step, 5 + 3)  # five uses on the device, three by the host's clock
        return (8.0 if turn == 2 else 4.0) * (10.0 if place == 1 else 1.0)

    watch = Stopwatch(new_bench(), clock)
    watch.add("a", lambda: clock.use(device_ms, 0.1, [], "a"))
    row = by_name(watch.run())["a"]
    assert row.uses == 5
    assert row.rounds_ms == (4.0, 4.0, 8.0, 4.0, 4.0)
    assert (row.median_ms, row.spread) == (4.0, 1.0)


@pytest.mark.parametrize(("one_ms", "uses"), [(0.0001, MOST_USES), (0.5, 40), (12.0, FEWEST_USES), (200.0, 1)])
def test_how_many_uses_make_a_round_follows_from_how_long_one_takes(clock: HandClock, one_ms: float, uses: int) -> None:
    watch = Stopwatch(new_bench(), clock)
    watch.add("a", lambda: clock.use(one_ms, 0.0, [], "a"))
    assert by_name(watch.run())["a"].uses == uses


class Odd(BaseException):
    """What compiled code makes up."""


@pytest.mark.thorough
@pytest.mark.parametrize("fault", [RuntimeError("cuDNN error"), SystemExit(3), Odd("odd")])
@pytest.mark.parametrize("when", ["made", "first", "alone", "in a round"])
def test_what_raises_is_a_check_that_failed_and_stops_no_other_use(
    clock: HandClock, fault: BaseException, when: str
) -> None:
    bench, calls = new_bench(), list[str]()
    last = {"made": 0, "first": 1, "alone": FIRST_USES + 1, "in a round": FIRST_USES + 8}[when]

    def make() -> Use:
        if when == "made":
            raise fault
        good = clock.use(30.0, 0.1, [], "bad")

        def call() -> Any:
            calls.append("bad")
            if len(calls) >= last:
                raise fault
            return good.call()

        return Use(call)

    watch = Stopwatch(bench, clock)
    watch.add("bad", make)
    watch.add("good", lambda: clock.use(30.0, 0.1, [], "good"))
    assert [row.name for row in watch.run()] == ["good", "good.host"]
    assert failed(bench) == {"speed.bad.ran": f"{type(fault).__name__}: {fault}"}
    assert [check.name for check in bench.checks] == ["speed.bad.ran", "speed.good.ran"]


class Card:
    """What `CudaClock` uses of torch.cuda, and what was done with it in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.cycles: list[int] = []
        self.events = 0
        self.early: list[bool] = []  # of each pause, whether it was over too early

    def synchronize(self) -> None:
        self.done.append("wait")

    def _sleep(self, cycles: int) -> None:
        self.done.append("pause")
        self.cycles.append(cycles)

    def Event(self, *, enable_timing: bool = False) -> Any:  # noqa: N802 - torch's name
        if not enable_timing:
            early = self.early.pop(0) if self.early else False
            return types.SimpleNamespace(record=lambda: self.done.append("pause ends"), query=lambda: early)
        self.events += 1
        number = self.events
        mark = types.SimpleNamespace(number=number, record=lambda: self.done.append("record"))
        mark.elapsed_time = lambda other: 0.5 if other.number > number else -0.5
        return mark

    def empty(self, size: int, *, dtype: Any, device: str) -> Any:
        assert (dtype, device) == (torch.int8, "cuda")
        assert size >= 2 * 126 * 2**20  # of a B200's L2 cache
        return types.SimpleNamespace(zero_=lambda: self.done.append("flush"))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()
    monkeypatch.setattr(module, "torch", types.SimpleNamespace(cuda=made, empty=made.empty, int8=torch.int8))
    return made


def test_the_clock_of_a_card_holds_it_up_once_and_flushes_before_every_use(card: Card) -> None:
    clock = CudaClock()
    assert clock.device_ms(lambda: card.done.append("use"), 2, launch_ms=1.0) == ([0.5, 0.5], True)
    assert card.done == ["wait", "pause", "pause ends", "flush", "record", "use", "record", "wait"] * 2
    assert card.cycles[0] >= 1.0 * 1.98e6  # as long as a launch at the highest clock
    clock.device_ms(lambda: None, 3, launch_ms=50.0)
    assert card.cycles[-1] <= 0.1 * 1.98e9  # a host that sleeps does not make the device sleep for long


@pytest.mark.parametrize(("early", "held"), [([True, False, False], True), ([True, True, False], False)])
def test_uses_that_the_host_launched_too_late_are_told_where_they_are_many(
    card: Card, early: list[bool], held: bool
) -> None:
    card.early = early
    times, was_held = CudaClock().device_ms(lambda: None, 3, launch_ms=2.0)
    assert (len(times), was_held) == (3, held)


def test_a_row_whose_device_was_not_held_says_so_in_its_clock(clock: HandClock) -> None:
    clock.holds = False
    stopwatch = Stopwatch(new_bench(), clock)
    stopwatch.add("waits", lambda: clock.use(1.0, 0.1, [], "waits"))
    rows = by_name(stopwatch.run())
    assert rows["waits"].clock == "cuda-events, not held"
    assert rows["waits.host"].clock == "perf_counter"
