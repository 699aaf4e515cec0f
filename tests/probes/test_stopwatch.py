"""The stopwatch, by a clock that is wound by hand and by a real one: interleaved rounds, medians, and what raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megacpp_validate.evidence.receipt import Timing
from megacpp_validate.probes import speeds as module
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.order import Order, Target
from megacpp_validate.probes.speeds import (
    FIRST_USES,
    LAST_WARM_UP,
    ROUNDS,
    USES,
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


@pytest.mark.parametrize("holds", [True, False])
def test_a_use_has_a_row_of_device_time(clock: HandClock, holds: bool) -> None:
    bench, clock.holds = new_bench(), holds
    watch = Stopwatch(bench, clock)
    watch.add("bf16.forward", lambda: clock.use(2.0, 0.5, [], "a"))
    (row,) = watch.run()
    assert (row.name, row.rounds_ms, row.uses) == ("bf16.forward", (2.0,) * ROUNDS, USES)
    assert row.clock == ("cuda-events" if holds else "cuda-events, not held")
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
    assert turns == ["a", "b"] * (ROUNDS + 1)  # once to warm up, then the rounds


def test_a_row_is_the_median_of_every_round_and_their_spread(clock: HandClock) -> None:
    """One use in each round takes ten times as long, and one round as a whole twice as long."""
    done = iter(range(10_000))

    def device_ms() -> float:
        number = next(done)
        if number < FIRST_USES + LAST_WARM_UP:
            return 4.0
        turn, place = divmod(number - FIRST_USES - LAST_WARM_UP, USES)
        return (8.0 if turn == 2 else 4.0) * (10.0 if place == 1 else 1.0)

    watch = Stopwatch(new_bench(), clock)
    watch.add("a", lambda: clock.use(device_ms, 0.1, [], "a"))
    row = by_name(watch.run())["a"]
    assert row.rounds_ms == (4.0, 4.0, 8.0, 4.0, 4.0)
    assert (row.median_ms, row.spread) == (4.0, 1.0)


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
    assert [row.name for row in watch.run()] == ["good"]
    assert failed(bench) == {"speed.bad.ran": f"{type(fault).__name__}: {fault}"}
    assert [check.name for check in bench.checks] == ["speed.bad.ran", "speed.good.ran"]
