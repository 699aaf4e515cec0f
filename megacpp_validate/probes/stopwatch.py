"""How long one use of a module takes: rounds of many uses, the rounds of all uses interleaved, medians of each.

Two clocks, because they tell different faults:

- Device time, by CUDA events around each use. The device is held up until the host has launched a group of uses, so
  that the time to launch is not in it, and 256 MiB are written before each use, so that the L2 cache is cold. A group
  that the host did not launch in time is measured again in smaller groups. A use that itself waits for the device
  cannot be held: what the host does is in its time, and the name of its clock says so.
- Wall-clock time on the host, from an idle device before a use to an idle device after it: what the host does for a use
  shows here, and only here. It carries the suffix `.host`. Without a GPU this is the one clock, and has no suffix.

How often a use runs follows from how long it takes, never from how its times scatter: a round is never repeated.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from ..evidence.receipt import Timing
from .bench import Bench

ROUNDS: Final = 5
ROUND_MS: Final = 20.0  # of the uses in a round: 40 000 times the resolution of events
HOST_ROUND_MS: Final = 10.0
MOST_USES: Final = 100
HELD_MS: Final = 200.0  # that a round may hold the device up: what is slow to launch runs fewer times
FEWEST_USES: Final = 3  # a median of fewer is none
SLOW_MS: Final = 50.0  # a use that takes longer runs once a round: nobody else may compute meanwhile
FIRST_USES: Final = 3  # what compiles, tunes and plans does it at the first; delayed scaling knows its scales then
LAST_WARM_UP: Final = 2  # alone on the device, right before the rounds
HOST: Final = ".host"
NOT_HELD: Final = ", not held"  # behind the name of a clock whose device went on before the host was ready


@dataclass(frozen=True)
class Use:
    """What is timed.

    Attributes:
        call: one use, which gives its output.
        choice: what the wrapper says it took, asked after a call; None where nothing is chosen.
    """

    call: Callable[[], Any]
    choice: Callable[[], Any] | None = None


class DeviceClock(Protocol):
    """The clock of a device."""

    @property
    def name(self) -> str:
        """As `Timing.clock` has it; "perf_counter" where there is no device apart from the host."""

    def wait(self) -> None:
        """Until the device is idle."""

    def device_ms(self, call: Callable[[], Any], uses: int, launch_ms: float) -> tuple[list[float], bool]:
        """Device time of every use, milliseconds, and whether the time to launch is in none of them.

        Args:
            call: one use.
            uses: how many.
            launch_ms: what the host needs to launch one.
        """


class CudaClock:
    """CUDA events on the current stream. Their resolution is about 0.5 microseconds (CUDA Runtime API, Event
    Management, cudaEventElapsedTime).
    """  # fmt: skip

    name: Final = "cuda-events"
    _FLUSHED_BYTES: Final = 256 * 2**20  # twice the L2 cache of a B200, five times that of an H200
    _CYCLES_PER_MS: Final = 2.0e6  # at the highest clock: the pause is at least as long as it is meant to be
    _LONGEST_PAUSE_MS: Final = 40.0
    _MARGIN: Final = 2.0  # a host that does something else meanwhile needs longer than at its best
    _MOST_AT_ONCE: Final = 32  # uses; a stream takes about a thousand launches before it makes the host wait

    def __init__(self) -> None:
        self._flushed = torch.empty(self._FLUSHED_BYTES, dtype=torch.int8, device="cuda")

    def wait(self) -> None:
        """Until the device is idle."""
        torch.cuda.synchronize()

    def device_ms(self, call: Callable[[], Any], uses: int, launch_ms: float) -> tuple[list[float], bool]:
        """Device time of every use, milliseconds, and whether the time to launch is in none of them."""
        at_once = int(self._LONGEST_PAUSE_MS / max(self._MARGIN * launch_ms, 1e-3))
        return in_groups(lambda count: self._group(call, count, launch_ms), uses, min(at_once, self._MOST_AT_ONCE))

    def _group(self, call: Callable[[], Any], uses: int, launch_ms: float) -> tuple[list[float], bool]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(uses)] for _ in range(2)]
        released = torch.cuda.Event()
        pause_ms = min(self._MARGIN * launch_ms * uses + 0.1, self._LONGEST_PAUSE_MS)
        self.wait()
        torch.cuda._sleep(int(pause_ms * self._CYCLES_PER_MS))
        released.record()
        for start, end in zip(*events, strict=True):
            self._flushed.zero_()
            start.record()
            call()
            end.record()
        held = not released.query()
        self.wait()
        return [start.elapsed_time(end) for start, end in zip(*events, strict=True)], held


def in_groups(
    measure: Callable[[int], tuple[list[float], bool]], uses: int, at_once: int
) -> tuple[list[float], bool]:  # fmt: skip
    """Measure uses in groups that are small enough for the device to be held up while the host launches one.

    Args:
        measure: times of that many uses, and whether the device was held up.
        uses: how many in all.
        at_once: size of the first group; halved as long as the device goes on too early.

    Returns:
        A time for every use, and whether the device was held up for each of them.
    """
    times: list[float] = []
    at_once, all_held = max(1, at_once), True
    while len(times) < uses:
        found, held = measure(min(at_once, uses - len(times)))
        if held or at_once == 1:  # one alone that is not held waits for the device itself
            times += found
            all_held &= held
        else:
            at_once = max(1, at_once // 2)
    return times, all_held


class HostClock:
    """The host is the device: `time.perf_counter`."""

    name: Final = "perf_counter"

    def wait(self) -> None:
        """Nothing runs behind a call."""

    def device_ms(self, call: Callable[[], Any], uses: int, launch_ms: float) -> tuple[list[float], bool]:  # noqa: ARG002
        """Wall-clock time of every use, milliseconds."""
        return [wall for wall, _ in _host_ms(self, call, uses)], True


@dataclass
class _Timed:
    """A use on its way through the stopwatch."""

    name: str
    use: Use
    on_device: bool
    on_host: bool
    device_rounds: list[float] = field(default_factory=list)
    host_rounds: list[float] = field(default_factory=list)
    device_uses: int = 0
    host_uses: int = 0
    launch_ms: float = 0.0
    held: bool = True


class Stopwatch:
    """Times the uses of one module.

    Every use gives a check `speed.NAME.ran`, passed or not: one that raises is told, and stops no other.

    Attributes:
        bench: device, order and bridge module for what makes the uses; takes the checks.
    """

    def __init__(self, bench: Bench, clock: DeviceClock | None = None) -> None:
        self.bench = bench
        self._clock: DeviceClock = clock or (CudaClock() if bench.device == "cuda" else HostClock())
        self._timed: list[_Timed] = []

    def add(self, name: str, make: Callable[[], Use], *, on_host_alone: bool = False) -> None:
        """Make a use and run it for the first times, so that what is compiled for it is compiled.

        Args:
            name: dotted: precision, what, which direction.
            make: makes layers and tensors; what it raises is the use's failure.
            on_host_alone: nothing of it runs on a device.
        """
        with self._held_to(name) as held:
            use = make()
            made = use.call()
            if use.choice is not None:
                self.bench.ran_on(f"speed.{name}", use.choice(), made)
            for _ in range(FIRST_USES - 1):
                use.call()
            self._clock.wait()
            apart = self._clock.name != HostClock.name
            held.append(_Timed(name, use, on_device=not (apart and on_host_alone), on_host=apart))
        self._timed += held

    def run(self) -> tuple[Timing, ...]:
        """Time every use that ran; call it while nothing else uses the device."""
        with _no_collector():
            for timed in tuple(self._timed):
                self._or_drop(timed, self._count)
            for _ in range(ROUNDS):
                for timed in tuple(self._timed):
                    self._or_drop(timed, self._round)
        for timed in self._timed:
            self.bench.check(f"speed.{timed.name}.ran", True, f"{ROUNDS} rounds were timed")
        return tuple(row for timed in self._timed for row in self._rows(timed))

    def _count(self, timed: _Timed) -> None:
        """Warm up, and see how many uses make a round."""
        host = _host_ms(self._clock, timed.use.call, LAST_WARM_UP)
        timed.launch_ms = min(launched for _, launched in host)
        if timed.on_device:
            device, _ = self._clock.device_ms(timed.use.call, LAST_WARM_UP, timed.launch_ms)
            most = int(HELD_MS / max(2.0 * timed.launch_ms, 1e-3))
            timed.device_uses = min(_uses(ROUND_MS, min(device)), max(FEWEST_USES, most))
        if timed.on_host:
            timed.host_uses = _uses(HOST_ROUND_MS, min(wall for wall, _ in host))

    def _round(self, timed: _Timed) -> None:
        if timed.on_device:
            device, held = self._clock.device_ms(timed.use.call, timed.device_uses, timed.launch_ms)
            timed.device_rounds.append(statistics.median(device))
            timed.held &= held
        if timed.on_host:
            host = _host_ms(self._clock, timed.use.call, timed.host_uses)
            timed.host_rounds.append(statistics.median(wall for wall, _ in host))

    def _rows(self, timed: _Timed) -> Iterator[Timing]:
        if timed.device_rounds:
            clock = self._clock.name if timed.held else self._clock.name + NOT_HELD
            yield new_timing(timed.name, clock, timed.device_rounds, timed.device_uses)
        if timed.host_rounds:
            yield new_timing(timed.name + HOST, HostClock.name, timed.host_rounds, timed.host_uses)

    def _or_drop(self, timed: _Timed, step: Callable[[_Timed], None]) -> None:
        with self._held_to(timed.name) as held:
            step(timed)
            held.append(timed)
        if not held:
            self._timed.remove(timed)

    @contextmanager
    def _held_to(self, name: str) -> Iterator[list[_Timed]]:
        """What is raised inside is a check that failed; nothing but an interrupt goes through."""
        try:
            yield []
        except KeyboardInterrupt:
            raise
        except BaseException as fault:  # SystemExit and what compiled code makes up, too: the receipt is earned
            self.bench.check(f"speed.{name}.ran", False, f"{type(fault).__name__}: {fault}"[:2000])


def new_timing(name: str, clock: str, rounds_ms: Sequence[float], uses: int) -> Timing:
    """A row from the medians of the rounds."""
    median = statistics.median(rounds_ms)
    spread = (max(rounds_ms) - min(rounds_ms)) / median if median else 0.0
    return Timing(name, clock, tuple(round(value, 6) for value in rounds_ms), round(median, 6), round(spread, 4), uses)


def _uses(round_ms: float, one_ms: float) -> int:
    """How many uses make a round."""
    if one_ms > SLOW_MS:
        return 1
    return min(MOST_USES, max(FEWEST_USES, math.ceil(round_ms / max(one_ms, 1e-6))))


def _host_ms(clock: DeviceClock, call: Callable[[], Any], uses: int) -> list[tuple[float, float]]:
    """Of every use the milliseconds until the device is idle again, and until the call returned."""
    found = []
    clock.wait()
    for _ in range(uses):
        start = time.perf_counter()
        call()
        returned = time.perf_counter()
        clock.wait()
        found.append(((time.perf_counter() - start) * 1e3, (returned - start) * 1e3))
    return found


@contextmanager
def _no_collector() -> Iterator[None]:
    """The garbage collector may not choose whose use takes longer."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
