"""Slower than the noise of the card, or not: rounds of two receipts held to what two runs of one stack are apart by."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ...evidence.receipt import Machine, Receipt, Timing
from .upgrade_result import TimingChange

HOST: Final = ".host"  # suffix of wall-clock times beside device times
FEWEST_ROUNDS: Final = 3
# Rounds of device time on an idle card lie within 2 % (54 uses on one H200, 2026-11-21); where they lie further apart
# than this, the time of the host was in them (receipts before 2026-11-21 16:40 UTC did not see to that).
STEADY: Final = {"cuda-events": 0.2}

# What is believed of a card before it was measured: two processes differ by this much (1 sigma of the logarithm), and
# that weighs as much as this many measured modules. A GPU's clock moves in steps of 15 MHz of some 1980, and two of
# them are 1.5 %; a host that imports for other cells meanwhile is taken to vary twice as much.
PRIOR: Final[dict[str, float]] = {"cuda-events": 0.015, "perf_counter": 0.03}
PRIOR_WEIGHT: Final = 4
_BELIEVED: Final = ("cuda-events",)
CLOCK_RESOLUTION_MS: Final = {"cuda-events": 0.0005, "perf_counter": 0.0001}  # CUDA Runtime API, cudaEventElapsedTime

# One use in 2000 is further out than this many deviations, one-sided: quantiles of Student's t by degrees of freedom.
_T: Final = {
    4: 8.610, 5: 6.869, 6: 5.959, 7: 5.408, 8: 5.041, 9: 4.781, 10: 4.587, 11: 4.437, 12: 4.318, 15: 4.073, 20: 3.850,
    30: 3.646, 60: 3.460, 120: 3.373,
}  # fmt: skip
# The median of five rounds deviates by 0.536 of what one round does (order statistics of the normal distribution; H. L.
# Harter and N. Balakrishnan, CRC Handbook of Tables for the Use of Order Statistics, 1996), and there are two of them.
_TWO_MEDIANS: Final = math.sqrt(2.0) * 0.536
_ROUNDS_SIGMAS: Final = 4.0
# A slowdown that modules share is none of theirs: so many must, and no more than this may be spared.
FEWEST_SHARING: Final = 3
MOST_SPARED: Final = 1

Receipts = Mapping[str, Receipt]
"""Receipts of one stack by module."""


@dataclass(frozen=True)
class CardNoise:
    """What two runs of one stack on one card are apart by.

    Attributes:
        card: host, GPU and driver; empty strings where nothing was run twice.
        spreads: by clock, 1 sigma of the logarithm of the ratio of two processes' times, and the modules run twice.
        apart: ratio of the two runs of each use, the larger over the smaller, by module, name and clock.
    """

    card: tuple[str, str, str]
    spreads: Mapping[str, tuple[float, int]]
    apart: Mapping[tuple[str, str, str], float]


@dataclass(frozen=True)
class SharedSlowdown:
    """One factor by which the uses of several modules became slower: the card, its clock, or the host.

    Attributes:
        factor: median of the ratios.
        modules: that share it, in the order of the changes.
        changes: rows that it explains.
        summary: what was seen, in a sentence.
    """

    factor: float
    modules: tuple[str, ...]
    changes: tuple[TimingChange, ...]
    summary: str


@dataclass(frozen=True)
class Slowness:
    """Who is slower: on its own account, and by what all share.

    Attributes:
        own: rows of modules that became slower beyond what is shared.
        shared: of the device's times and of the host's; empty where nothing is shared.
    """

    own: tuple[TimingChange, ...]
    shared: tuple[SharedSlowdown, ...]


def measure_noise(first: Receipts, again: Receipts) -> CardNoise:
    """What two runs of one stack on the same card are apart by.

    A process has a speed of its own beside the scatter of its rounds, and a module gives one pair of them: so all
    modules of a clock count together, and what is believed of any card counts as four more.

    Args:
        first, again: receipts of one stack, of two runs.
    """
    cards = [_card(receipt.machine) for receipt in again.values() if receipt.timings]
    card = statistics.mode(cards) if cards else ("", "", "")
    apart: dict[tuple[str, str, str], float] = {}
    squares: dict[str, list[float]] = {}
    for module in sorted(first.keys() & again.keys()):
        before, after = first[module], again[module]
        if before.stack != after.stack or {_card(before.machine), _card(after.machine)} != {card}:
            continue
        of_module: dict[str, list[float]] = {}
        for one, other in _pairs(before, after):
            if one.clock == other.clock:
                distance = math.log(other.median_ms / one.median_ms)
                apart[module, one.name, one.clock] = math.exp(abs(distance))
                of_module.setdefault(one.clock, []).append(distance**2)
        for clock, found in of_module.items():
            squares.setdefault(clock, []).append(statistics.fmean(found))
    return CardNoise(card, {clock: _spread(clock, found) for clock, found in squares.items()}, apart)


def compare_timings(before: Receipts, after: Receipts, noise: CardNoise) -> tuple[TimingChange, ...]:
    """Every use that was timed on both sides, in the order of `after`.

    A use is slower if the ratio of its medians is beyond the noise and every round of `after` took longer than every
    round of `before`. Where nothing was run twice, the noise of device times is what is believed of any card, if enough
    modules are timed to tell a slow card from a slow module. Times on the host are not among them: healthy releases
    differ by 39 % there (permute, 2.12.0 to 2.20.2). Where nothing can be compared (the cards differ, the noise is
    another card's, or a time is the host's), a row has `noise` 0, is not slower, and its derivation begins with "not
    compared".
    """
    both = [module for module in after if module in before]
    pairs = [(module, *pair) for module in both for pair in _pairs(before[module], after[module])]
    timed = {module for module, one, _ in pairs if one.clock in _BELIEVED}
    any_card = {clock: _spread(clock, ()) for clock in _BELIEVED}
    rows: list[TimingChange] = []
    for module, one, other in pairs:
        known, cards = noise, [_card(side[module].machine) for side in (before, after)]
        if not any(noise.card) and len(timed) >= FEWEST_SHARING:
            known = CardNoise(cards[0], any_card, {})
        ratio = other.median_ms / one.median_ms
        bound, derivation = 0.0, _why_not(cards, one, other, known)
        if not derivation:
            bound, derivation = _bound(module, one, other, known)
        slower = 0.0 < bound < ratio and min(other.rounds_ms) > max(one.rounds_ms)
        rows.append(
            TimingChange(
                module=module, name=one.name, before_ms=one.median_ms, after_ms=other.median_ms, ratio=ratio,
                noise=bound, slower=slower, derivation=derivation,
            )
        )  # fmt: skip
    return tuple(rows)


def split_slowness(changes: Sequence[TimingChange]) -> Slowness:
    """Take what all modules share out of what is slower: a clock that was lowered is none of their faults.

    Shared is a factor that at least three modules, and all but one at most, lie nearer to than to no change at all,
    with every use of theirs. Device and host are looked at apart, but a time on the host has that on the device in it:
    as much slower is explained by a slower device. What is slower than the shared factor by more than its noise stays
    its module's own.
    """
    device, host = ([row for row in changes if row.name.endswith(HOST) is on_host] for on_host in (False, True))
    on_device, on_host = _find_shared(device), _find_shared(host)
    if on_device is not None and on_host is None:
        compared = [row for row in device if row.noise >= 1.0]  # it is 0 where two runs could not be compared
        apart = {row.module for row in compared} - set(on_device.modules)
        waited = tuple(
            row for row in host if row.slower and row.module not in apart and row.ratio <= on_device.factor * row.noise
        )
        on_device = replace(on_device, changes=(*on_device.changes, *waited))
    shared = tuple(found for found in (on_device, on_host) if found is not None)
    explained = {(change.module, change.name) for one in shared for change in one.changes}
    own = tuple(change for change in changes if change.slower and (change.module, change.name) not in explained)
    return Slowness(own, shared)


def _card(machine: Machine) -> tuple[str, str, str]:
    return machine.host, machine.gpu, machine.driver


def _spread(clock: str, squares: Sequence[float]) -> tuple[float, int]:
    prior = PRIOR.get(clock, max(PRIOR.values()))
    weighted = PRIOR_WEIGHT * 2.0 * prior**2 + sum(squares)  # of two processes, the variance is twice that of one
    return math.sqrt(weighted / (PRIOR_WEIGHT + len(squares))), len(squares)


def _pairs(before: Receipt, after: Receipt) -> Iterable[tuple[Timing, Timing]]:
    """Uses that were timed in both, and whose times can be believed."""

    def is_time(timing: Timing) -> bool:
        return all(math.isfinite(value) and value > 0.0 for value in (timing.median_ms, *timing.rounds_ms))

    known = {timing.name: timing for timing in before.timings if is_time(timing)}
    return [(known[timing.name], timing) for timing in after.timings if timing.name in known and is_time(timing)]


def _why_not(cards: Sequence[tuple[str, str, str]], one: Timing, other: Timing, noise: CardNoise) -> str:
    """Why two timings cannot be compared; empty where they can."""
    one_card, other_card = (
        f"{gpu or 'the CPU'} of {host or 'an unknown host'}{f', driver {driver}' if driver else ''}"
        for host, gpu, driver in cards
    )
    apart = max(one.spread, other.spread)
    reasons = (
        (cards[0] != cards[1], f"before it ran on {one_card}, now on {other_card}"),
        (one.clock != other.clock, f"before it was timed by {one.clock}, now by {other.clock}"),
        (
            one.clock not in noise.spreads or noise.card != cards[0],
            f"no stack was run twice on {one_card}, so its noise is not known",
        ),
        (
            min(len(one.rounds_ms), len(other.rounds_ms)) < FEWEST_ROUNDS,
            f"fewer than {FEWEST_ROUNDS} rounds were timed",
        ),
        (
            apart > STEADY.get(one.clock, math.inf),
            f"rounds of one process lie {apart:.0%} apart, which the device alone does not do",
        ),
    )
    return next((f"not compared: {reason}" for is_so, reason in reasons if is_so), "")


def _bound(module: str, one: Timing, other: Timing, noise: CardNoise) -> tuple[float, str]:
    """The ratio that is to be believed of noise, and where it comes from: the largest of four."""
    sigma, modules = noise.spreads[one.clock]
    processes = math.exp(_T[max(known for known in _T if known <= modules + PRIOR_WEIGHT)] * sigma)
    logs = [[math.log(value) for value in timing.rounds_ms] for timing in (one, other)]
    squares = sum((value - statistics.fmean(some)) ** 2 for some in logs for value in some)
    rounds = math.sqrt(squares / sum(len(some) - 1 for some in logs))  # about their own process's mean
    prior = PRIOR.get(one.clock, max(PRIOR.values()))
    parts = {
        f"two processes of one stack differ by {sigma:.1%} here ({modules} modules run twice, and {PRIOR_WEIGHT} "
        f"believed at {prior:.1%} a process), and one use in 2000 by more than this": processes,
        f"rounds differ by {rounds:.1%}: {_ROUNDS_SIGMAS:g} sigma of two medians of them": math.exp(
            _ROUNDS_SIGMAS * _TWO_MEDIANS * rounds
        ),
        "as far as two runs of one stack lay apart in this very use": noise.apart.get(
            (module, one.name, one.clock), 1.0
        ),
        "twice the resolution of the clock": 1.0 + 2.0 * CLOCK_RESOLUTION_MS.get(one.clock, 0.0) / one.median_ms,
    }
    derivation = max(parts, key=lambda name: parts[name])
    return parts[derivation], f"{derivation}; and no round of before is as long as the shortest now"


def _find_shared(changes: Sequence[TimingChange]) -> SharedSlowdown | None:
    """One factor that explains the uses of most modules, if any is slower at all."""
    compared = [change for change in changes if change.noise >= 1.0]
    modules = tuple(dict.fromkeys(change.module for change in compared))
    if len(modules) < FEWEST_SHARING or not any(change.slower for change in compared):
        return None
    logs = {module: [math.log(one.ratio) for one in compared if one.module == module] for module in modules}
    middle = statistics.median(statistics.median(found) for found in logs.values())
    factor = math.exp(middle)
    sharing = tuple(module for module in modules if middle > 0.0 and min(logs[module]) >= middle / 2.0)
    if len(sharing) < max(FEWEST_SHARING, len(modules) - MOST_SPARED):
        return None
    explained = tuple(
        one for one in compared if one.slower and one.module in sharing and one.ratio <= factor * one.noise
    )
    summary = (
        f"{len(sharing)} of {len(modules)} modules became slower by the same factor, {factor:.2f}: a lower clock or "
        "another load on this machine, or a library that all of them stand on"
    )
    return SharedSlowdown(factor, sharing, explained, summary)
