"""What became worse in a cell that is good on both sides: time, kernels, late compiles, memory. No check shows it.

Times of two receipts are held to what two runs of one stack are apart by. The rest is a fact of two receipts, and needs
no noise of a card: which kernel ran, how many were compiled after warm-up, and what an allocator held at its peak.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ...diagnosis.blame import Order
from ...diagnosis.checks import FIREWALL, SHARED_PARTS, USES, of_module
from ...diagnosis.culprits import Culprit, Sides
from ...diagnosis.next_steps import slow_step
from ...evidence.receipt import Backend, Machine, Outcome, Receipt, Timing
from ...evidence.values import ENVIRONMENT, Cause
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

# Transformer Engine's own attention of plain products and a softmax: right, and taken where no fused kernel is.
SLOW_KERNELS: Final = frozenset({"unfused"})
# As the gate's `memory` and `memory_floor_mib`: matrix/gate.toml says what healthy releases differ by, up and down.
MEMORY_RATIO: Final = 1.10
MEMORY_RISE_MIB: Final = 4 * 32.0  # four workspaces of cuBLAS
# As the bridge says it of a vendor (bridge/vendor.py). A package that is not there was not damaged.
_UNUSABLE: Final = re.compile(
    r" cannot be used: "
    r"(?!ModuleNotFoundError: No module named '(?:flash_attn|deep_gemm|torchao|liger_kernel|transformer_engine))"
)
_NAMES_KERNELS: Final = 5  # the first schema of receipts that names each kernel that was compiled

_LOW: Final = frozenset({"fp8", "delayed", "current", "block", "mxfp8", "nvfp4"})
_HIGH: Final = frozenset({"fp32", "bf16", "fp16"})

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


# --- culprits that are good -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watched:
    """One module that is good and changed, or became slower.

    Attributes:
        signature: what makes two sightings one.
        summary: what was seen, in a sentence without its end.
        evidence: the lines that show it.
        accepting: what a person accepts who goes on with it.
        others: modules that depend on it and changed in the same way, or are slower by it.
        explains_time: whether a module that changed so may be slower by it.
    """

    module: str
    cause: Cause
    signature: str
    summary: str
    evidence: tuple[str, ...]
    accepting: str
    others: tuple[str, ...] = ()
    explains_time: bool = False


def find_watched(
    before: Mapping[str, Receipt], after: Mapping[str, Receipt], order: Order, red: Collection[str]
) -> tuple[Watched, ...]:
    """Every change of the kind, in dependency order, filed under the first module that changed in the same way.

    Args:
        before, after: by module.
        red: modules that are red: a module that depends on one may take another path by it, and is not named for that.
    """
    found: list[Watched] = []
    for module in sorted(before.keys() & after.keys(), key=order.rank):
        one, other = before[module], after[module]
        whole = one.outcome is Outcome.PASS and other.outcome is Outcome.PASS
        if not whole or any(order.depends(module, name) for name in red):
            continue
        for seen in filter(None, (look(module, one, other) for look in _LOOKS)):
            first = next(
                (row for row in found if row.signature == seen.signature and order.depends(module, row.module)), None
            )
            if first is None:
                found.append(seen)
            else:
                found[found.index(first)] = replace(first, others=(*first.others, module))
    return tuple(found)


def name_green(
    watched: Sequence[Watched], own: Sequence[TimingChange], timed: Sequence[TimingChange], order: Order,
    red: Collection[str], sides: Sides,
) -> tuple[Culprit, ...]:  # fmt: skip
    """Culprits that are good, slower or changed, in dependency order: one a module, whatever of it changed.

    A slower kernel and late compiles explain why a module is slower: its time is reported with them, under the module
    that was the first to change so. Memory explains no time.

    Args:
        watched: what changed.
        own: timings that are slower beyond the noise and beyond what all share.
        timed: every timing.
        red: red modules.
    """
    heads: dict[str, str] = {}
    groups: dict[str, list[Watched]] = {one.module: [] for one in watched}
    for one in watched:
        groups[one.module].append(one)
        if one.explains_time:
            for name in (one.module, *one.others):
                heads.setdefault(name, one.module)
    for slow in _find_slow(own, order, red, timed):
        groups.setdefault(heads.get(slow.module, slow.module), []).append(slow)
    culprits = []
    for module in sorted(groups, key=order.rank):
        parts, component = groups[module], sides.stands_on(module)
        others = {name for part in parts for name in (part.module, *part.others)} - {module}
        cascades = tuple(sorted(others, key=order.rank))
        accepting = " and ".join(part.accepting for part in parts)
        culprits.append(
            Culprit(
                module=ENVIRONMENT if component else module,
                # Why it is slower is worth more than that it is.
                cause=next((part.cause for part in parts if part.cause is not Cause.PERFORMANCE), Cause.PERFORMANCE),
                component=component,
                signature="; ".join(part.signature for part in parts),
                summary=f"{'. '.join(part.summary for part in parts)}.",
                evidence=tuple(line for part in parts for line in part.evidence),
                entry_points=() if module == FIREWALL else USES.get(module, ()),
                next_step=slow_step(module, component, replace(sides.facts, held=True), accepting),
                cascades=(module, *cascades) if component else cascades,
                green=True,
            )
        )
    return tuple(culprits)


def name_shared(shared: SharedSlowdown, sides: Sides) -> Culprit:
    """A slowdown that modules share, as a culprit: a lower clock explains no kernel, no compile and no memory."""
    return Culprit(
        module=ENVIRONMENT,
        cause=Cause.PERFORMANCE,
        component=sides.changed[0] if len(sides.changed) == 1 else "",
        signature=f"slower by {shared.factor:.2f}: {', '.join(shared.modules)}",
        summary=shared.summary,
        evidence=tuple(map(_describe_timing, shared.changes)),
        next_step="look at the clocks, the temperature and what else runs on this machine, and time both stacks again; "
        f"stay on {sides.facts.before} if it lasts",
        cascades=shared.modules,
    )


def _describe_timing(row: TimingChange) -> str:
    bound = f"believed of noise: {row.noise:.3f} ({row.derivation})" if row.noise else row.derivation
    return f"{row.module} {row.name}: {row.before_ms:.4g} -> {row.after_ms:.4g} ms, ratio {row.ratio:.3f}; {bound}"


# --- slower by itself, or by another module -------------------------------------------------------------------------


def _find_slow(
    own: Sequence[TimingChange], order: Order, red: Collection[str], timed: Sequence[TimingChange]
) -> list[Watched]:
    """Every slower module filed under the first that it depends on and that is slower in the same way.

    What is red is not slow as well, and what depends on it may be slow by another path.
    """
    rows: dict[str, list[TimingChange]] = {}
    for row in own:
        if row.module not in red:
            rows.setdefault(row.module, []).append(row)
    held = frozenset((row.module, row.name) for row in timed if row.noise and not row.slower)
    slow: dict[str, list[str]] = {}
    for module in sorted(rows, key=order.rank):
        if any(order.depends(module, other) and _share(module, other) for other in red if other != FIREWALL):
            continue
        causes = (one for one in slow if order.depends(module, one) and _slows(one, rows[one], module, rows, held))
        cause = next(causes, module)
        slow.setdefault(cause, [])
        slow[cause] += [module] if cause != module else []
    return [_describe_slow(module, rows[module], others) for module, others in slow.items()]


def _describe_slow(module: str, rows: Sequence[TimingChange], others: Sequence[str]) -> Watched:
    # Time on the host has that of the device in it, and is noisier.
    worst = max(rows, key=lambda row: (not row.name.endswith(HOST), row.ratio))
    slowest = f"{worst.ratio:.2f} times the time of `{worst.name}`"
    return Watched(
        module,
        Cause.PERFORMANCE,
        f"slower: {', '.join(sorted({row.name for row in rows}))}",
        f"{module} takes {slowest} (it was {worst.before_ms:.3g} ms and is {worst.after_ms:.3g} ms)",
        tuple(map(_describe_timing, rows)),
        slowest,
        tuple(others),
    )


def _slows(
    cause: str, its: Sequence[TimingChange], module: str, rows: Mapping[str, Sequence[TimingChange]],
    held: Collection[tuple[str, str]],
) -> bool:  # fmt: skip
    """Whether what is slower in one module makes every row of another slower."""
    low = all(_is_low(row.name) for row in its)
    if cause != FIREWALL and not _share(cause, module) and not _share_part(cause, module, held, low=low):
        return False
    # The cost of the scope on the host is paid by what runs in it, on the device too, which waits for the host.
    backward = all(_is_of_backward(row, held) for row in its)
    return all(
        (cause != FIREWALL or row.name.endswith(HOST) or _is_low(row.name))
        and (_is_low(row.name) or not low)
        and (not backward or "backward" in _words(row.name))
        for row in rows[module]
    )


def _share(one: str, other: str) -> bool:
    mine, theirs = of_module(one), of_module(other)
    return mine is None or theirs is None or bool(mine & theirs)


def _share_part(cause: str, module: str, held: Collection[tuple[str, str]], *, low: bool) -> bool:
    """Whether both run one part of Transformer Engine, and no use of the device that runs it is as fast as it was.

    As of numbers that are wrong: every entry point that runs the shared code must show it.
    """
    mine, theirs = (of_module(name) or frozenset() for name in (cause, module))
    return any(
        part.shows & mine == mine
        and part.shows & theirs
        and not any(
            part.shows & (of_module(other) or frozenset())
            for other, name in held
            if not name.endswith(HOST) and (not low or _is_low(name))
        )
        for part in SHARED_PARTS
    )


def _is_of_backward(row: TimingChange, held: Collection[tuple[str, str]]) -> bool:
    """Whether the backward pass alone is slower: a use of both passes is where its forward pass by itself is not."""
    words = _words(row.name)
    alone = row.name.replace("forward-backward", "forward")
    return "backward" in words and ("forward" not in words or (row.module, alone) in held)


def _words(name: str) -> frozenset[str]:
    return frozenset(re.split(r"[.-]", name))


def _is_low(name: str) -> bool:
    """Whether a use is of a low precision: of "bf16.block.forward" the block is no recipe."""
    return bool(_words(name) & _LOW) and not _words(name) & _HIGH


# --- what two receipts show -----------------------------------------------------------------------------------------


def _find_slow_kernel(module: str, before: Receipt, after: Receipt) -> Watched | None:
    """A path that asks for the same, ran a fused kernel and runs a slow one now, on a card of the same capability."""
    if before.machine.capability != after.machine.capability:
        return None
    known = _paths(before)
    rows = [
        (row, old)
        for path, row in _paths(after).items()
        if (old := known.get(path)) is not None and (old.requested, old.claimed) == (row.requested, row.claimed)
        and SLOW_KERNELS & {*row.observed} and not SLOW_KERNELS & {*old.observed} and {*old.observed} - {old.claimed}
    ]  # fmt: skip
    if not rows:
        return None
    first, old = rows[0]
    fused, now = (", ".join(kernel for kernel in row.observed if kernel != row.claimed) for row in (old, first))
    summary = f"{module} ran by {fused} and runs by {now} now, in {len(rows)} paths; its numbers are right"
    shown = (f"{row.path}: observed {', '.join(was.observed)} -> {', '.join(row.observed)}" for row, was in rows)
    signature, accepting = f"another kernel: {now}", f"that {module} runs by {now}"
    return Watched(
        module, Cause.SILENT_FALLBACK, signature, summary, tuple(shown), accepting, explains_time=True
    )  # fmt: skip


def _find_lost_backend(module: str, before: Receipt, after: Receipt) -> Watched | None:
    """A second backend that ran, and reports itself that it cannot be loaded now: what took its paths is right.

    One that is not installed at all is another environment, and no fault of it.
    """
    if before.machine.gpu != after.machine.gpu or before.requested != after.requested:
        return None
    ran = {row.requested for row in before.backends if row.requested in row.observed}
    gone = [row for row in after.backends if row.requested in ran and not row.claimed and not row.observed]
    lost = {row.requested: why for row in gone for why in row.reasons if _UNUSABLE.search(why)}
    if not lost:
        return None
    names = ", ".join(lost)
    summary = f"{module} ran by {names} too, which cannot be loaded now; what takes its paths is right"
    signature, accepting = f"a backend is lost: {names}", f"that {module} runs without {names}"
    shown = tuple(dict.fromkeys(lost.values()))
    return Watched(module, Cause.SILENT_FALLBACK, signature, summary, shown, accepting, explains_time=True)


def _paths(receipt: Receipt) -> dict[str, Backend]:
    """Paths that one row alone is of: of several with one name nobody knows which is which."""
    count = Counter(row.path for row in receipt.backends)
    return {row.path: row for row in receipt.backends if count[row.path] == 1}


def _find_late_compiles(module: str, before: Receipt, after: Receipt) -> Watched | None:
    """Libraries that compiled nothing after warm-up, and do now.

    Kernels count, and no numbers by themselves: until receipts named each kernel (schema 5), what another process put
    into the same cache was counted, too (docs/evidence/fp8: deep_gemm, in healthy cells of 2.20.2). So before must name
    them, and what it lists of training ranks, or reports as not watched, is not new.
    """
    if int(before.schema_id.rpartition("/")[2]) < _NAMES_KERNELS:
        return None
    known = {name for name, number in before.jit.after.items() if number > 0} | before.jit.unwatched.keys()
    known |= {row.library for row in before.jit.compiled if row.when == "after"}
    kernels = [row for row in after.jit.compiled if row.when == "after" and row.library not in known]
    if not kernels:
        return None
    late = sorted(Counter(row.library for row in kernels).items())
    numbers = ", ".join(f"{name} {number}" for name, number in late)
    signature = f"compiled after warm-up: {', '.join(name for name, _ in late)}"
    summary = f"{module} compiles in its second use what it had compiled in its first: {numbers}"
    shown = tuple(dict.fromkeys(f"{row.library}: {row.kernel} {row.shape}".strip() for row in kernels))
    accepting = "a compile in the middle of a run"
    return Watched(module, Cause.PERFORMANCE, signature, summary, shown, accepting, explains_time=True)


def _find_memory(module: str, before: Receipt, after: Receipt) -> Watched | None:
    """More memory at the peak, of the same checks with the same numbers on the same kind of card."""
    same = (
        before.machine.gpu == after.machine.gpu != "" and before.seed == after.seed
        and {check.name for check in before.checks} == {check.name for check in after.checks}
    )  # fmt: skip
    old, new = before.peak_memory_mib, after.peak_memory_mib
    if not same or old <= 0.0 or new <= max(old * MEMORY_RATIO, old + MEMORY_RISE_MIB):
        return None
    times = f"{new / old:.2f} times the"
    summary = f"{module} holds {times} GPU memory at its peak (it was {old:.0f} MiB and is {new:.0f} MiB)"
    shown = f"peak of torch's allocator: {old:g} -> {new:g} MiB; no noise is more than {MEMORY_RATIO:.2f} times and "
    shown += f"more than {MEMORY_RISE_MIB:g} MiB, four workspaces of cuBLAS"
    return Watched(module, Cause.PERFORMANCE, "more memory at its peak", summary, (shown,), f"{times} memory")


_LOOKS: Final = (_find_slow_kernel, _find_lost_backend, _find_late_compiles, _find_memory)
