"""What became worse in a module that is good on both sides: time, kernels, late compiles, memory. No check shows it.

Times of two receipts are compared with the noise of two runs of one stack. The rest is read from two receipts without
any noise: which kernel ran, which kernels were compiled after warm-up, and the peak of the allocator.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ...diagnosis.blame import Order
from ...diagnosis.checks import FIREWALL, USES
from ...diagnosis.culprits import Culprit
from ...diagnosis.next_steps import Sides, slow_step
from ...evidence.receipt import Machine, Outcome, Receipt, Timing
from ...evidence.values import ENVIRONMENT, Cause, Frozen

HOST: Final = ".host"  # suffix of wall-clock times beside device times
DEVICE: Final = "cuda-events"  # clock of device times
FEWEST_ROUNDS: Final = 3
# Before a card is measured: two processes differ by this much (1 sigma of the logarithm), and the assumption weighs as
# much as four measured modules. A GPU's clock moves in steps of 15 MHz of some 1980, and two of them are 1.5 %; a host
# that imports for other cells meanwhile varies twice as much.
PRIOR: Final[dict[str, float]] = {DEVICE: 0.015}
HOST_PRIOR: Final = 0.03
PRIOR_WEIGHT: Final = 4
# One use in 2000 is further out than this many deviations, one-sided: quantiles of Student's t by degrees of freedom.
_T: Final = {
    4: 8.610, 5: 6.869, 6: 5.959, 7: 5.408, 8: 5.041, 9: 4.781, 10: 4.587, 11: 4.437, 12: 4.318, 15: 4.073, 20: 3.850,
    30: 3.646, 60: 3.460, 120: 3.373,
}  # fmt: skip
# The median of five rounds deviates by 0.536 of what one round does (order statistics of the normal distribution; H. L.
# Harter and N. Balakrishnan, CRC Handbook of Tables for the Use of Order Statistics, 1996), and there are two of them.
_TWO_MEDIANS: Final = math.sqrt(2.0) * 0.536
_ROUNDS_SIGMAS: Final = 4.0
# A slowdown is shared if at least this many modules have it, and all but this many.
FEWEST_SHARING: Final = 3
MOST_SPARED: Final = 1
# Transformer Engine's own attention of plain products and a softmax: right, and taken where no fused kernel is.
SLOW_KERNEL: Final = "unfused"
# As the gate's `memory` and `memory_floor_mib`: matrix/gate.toml says what healthy releases differ by, up and down.
MEMORY_RATIO: Final = 1.10
MEMORY_RISE_MIB: Final = 4 * 32.0  # four workspaces of cuBLAS
# What bridge/vendor.py says of a vendor. A package that is not installed is another environment, and not damaged.
_UNUSABLE: Final = re.compile(
    r" cannot be used: "
    r"(?!ModuleNotFoundError: No module named '(?:flash_attn|deep_gemm|torchao|liger_kernel|transformer_engine))"
)
_NAMES_KERNELS: Final = 5  # the first schema of receipts that names each kernel that was compiled

Receipts = Mapping[str, Receipt]
"""Receipts of one stack by module."""
Card = tuple[str, str, str]
"""Host, GPU, driver."""


class TimingChange(Frozen):
    """One timed use of a module on either side, beside the noise of the card.

    Attributes:
        ratio: after / before; above 1 is slower.
        noise: the largest ratio that noise explains; 0 where the two times cannot be compared.
        slower: beyond that noise.
        derivation: where `noise` comes from, or why the times were not compared.
    """

    module: str
    name: str
    before_ms: float
    after_ms: float
    ratio: float
    noise: float
    slower: bool
    derivation: str


@dataclass(frozen=True)
class CardNoise:
    """How far two runs of one stack on one card lie apart.

    Attributes:
        card: empty strings where nothing was run twice.
        spreads: by clock, 1 sigma of the logarithm of the ratio of two processes' times, and the modules run twice.
        apart: ratio of the two runs of each use, the larger over the smaller, by module and name.
    """

    card: Card = ("", "", "")
    spreads: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    apart: Mapping[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True)
class Slowness:
    """Slower uses, and a factor that most modules share: the card, its clock, or the host.

    Attributes:
        own: rows of modules that became slower beyond what is shared.
        factor: by which all are slower; 1 where nothing is shared.
        modules: that share it, of how many that were timed.
        shared: rows that the factor explains.
    """

    own: tuple[TimingChange, ...]
    factor: float = 1.0
    modules: tuple[str, ...] = ()
    timed: int = 0
    shared: tuple[TimingChange, ...] = ()


def measure_noise(first: Receipts, again: Receipts) -> CardNoise:
    """How far two runs of one stack on the same card lie apart.

    A process has a speed of its own beside the scatter of its rounds, and a module gives one pair of them: so all
    modules of a clock count together with the prior.

    Args:
        first, again: receipts of one stack, of two runs.
    """
    cards = [_card(receipt.machine) for receipt in again.values() if receipt.timings]
    card = statistics.mode(cards) if cards else CardNoise().card
    apart: dict[tuple[str, str], float] = {}
    squares: dict[str, list[float]] = {}
    for module in sorted(first.keys() & again.keys()):
        one, other = first[module], again[module]
        if one.stack != other.stack or {_card(one.machine), _card(other.machine)} != {card}:
            continue
        distances: dict[str, list[float]] = {}
        for before, after in _pairs(one, other):
            distance = abs(math.log(after.median_ms / before.median_ms))
            apart[module, before.name] = math.exp(distance)
            distances.setdefault(before.clock, []).append(distance**2)
        for clock, found in distances.items():
            squares.setdefault(clock, []).append(statistics.fmean(found))
    return CardNoise(card, {clock: _spread(clock, found) for clock, found in squares.items()}, apart)


def compare_timings(before: Receipts, after: Receipts, noise: CardNoise) -> tuple[TimingChange, ...]:
    """Every use that was timed on both sides, in the order of `after`.

    A use is slower if the ratio of its medians is beyond the noise and every round of `after` took longer than every
    round of `before`. Where nothing was run twice, device times are compared with the prior, if enough modules are
    timed to tell a slow card from a slow module. Times on the host are not: healthy releases differ by 39 % there
    (permute, 2.12.0 to 2.20.2). A row that cannot be compared has `noise` 0.
    """
    pairs = [(name, *pair) for name in after if name in before for pair in _pairs(before[name], after[name])]
    timed = {module for module, one, _ in pairs if one.clock == DEVICE}
    rows: list[TimingChange] = []
    for module, one, other in pairs:
        known, cards = noise, [_card(side[module].machine) for side in (before, after)]
        if not any(noise.card) and len(timed) >= FEWEST_SHARING:
            known = CardNoise(cards[0], {DEVICE: _spread(DEVICE, ())})
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
    """Separate what all modules share from what is slower: a lower clock is no module's fault.

    A factor is shared where at least three modules, and all but one at most, lie nearer to the factor than to no change
    with every use. Device times decide; where they share nothing, times on the host do. A use that is slower than the
    shared factor by more than its noise stays its module's own.
    """
    slower = [row for row in changes if row.slower]
    for on_host in (False, True):
        compared = [row for row in changes if row.noise >= 1.0 and row.name.endswith(HOST) is on_host]
        logs: dict[str, list[float]] = {}
        for row in compared:
            logs.setdefault(row.module, []).append(math.log(row.ratio))
        if len(logs) < FEWEST_SHARING or not any(row.slower for row in compared):
            continue
        middle = statistics.median(map(statistics.median, logs.values()))
        sharing = tuple(name for name, found in logs.items() if middle > 0.0 and min(found) >= middle / 2.0)
        if len(sharing) >= max(FEWEST_SHARING, len(logs) - MOST_SPARED):
            factor, apart = math.exp(middle), logs.keys() - set(sharing)
            rows = tuple(row for row in slower if row.module not in apart and row.ratio <= factor * row.noise)
            return Slowness(tuple(row for row in slower if row not in rows), factor, sharing, len(logs), rows)
    return Slowness(tuple(slower))


def _card(machine: Machine) -> Card:
    return machine.host, machine.gpu, machine.driver


def _spread(clock: str, squares: Sequence[float]) -> tuple[float, int]:
    prior = PRIOR.get(clock, HOST_PRIOR)
    weighted = PRIOR_WEIGHT * 2.0 * prior**2 + sum(squares)  # of two processes, the variance is twice that of one
    return math.sqrt(weighted / (PRIOR_WEIGHT + len(squares))), len(squares)


def _pairs(before: Receipt, after: Receipt) -> Iterable[tuple[Timing, Timing]]:
    """Uses that were timed in both, and whose times are positive numbers."""

    def is_time(timing: Timing) -> bool:
        return all(math.isfinite(value) and value > 0.0 for value in (timing.median_ms, *timing.rounds_ms))

    known = {timing.name: timing for timing in before.timings if is_time(timing)}
    return [(known[timing.name], timing) for timing in after.timings if timing.name in known and is_time(timing)]


def _why_not(cards: Sequence[Card], one: Timing, other: Timing, noise: CardNoise) -> str:
    """Why two timings cannot be compared; empty where they can."""
    old, new = (f"{gpu or 'the CPU'} of {host or 'an unknown host'} {driver}".strip() for host, gpu, driver in cards)
    if cards[0] != cards[1]:
        return f"not compared: before it ran on {old}, now on {new}"
    if one.clock != other.clock:
        return f"not compared: before it was timed by {one.clock}, now by {other.clock}"
    if noise.card != cards[0] or one.clock not in noise.spreads:
        return f"not compared: no stack was run twice on {old}, so its noise is not known"
    if min(len(one.rounds_ms), len(other.rounds_ms)) < FEWEST_ROUNDS:
        return f"not compared: fewer than {FEWEST_ROUNDS} rounds were timed"
    return ""


def _bound(module: str, one: Timing, other: Timing, noise: CardNoise) -> tuple[float, str]:
    """The largest ratio that noise explains, and where it comes from: the largest of three."""
    sigma, modules = noise.spreads[one.clock]
    processes = math.exp(_T[max(known for known in _T if known <= modules + PRIOR_WEIGHT)] * sigma)
    logs = [[math.log(value) for value in timing.rounds_ms] for timing in (one, other)]
    squares = sum((value - statistics.fmean(some)) ** 2 for some in logs for value in some)
    rounds = math.sqrt(squares / sum(len(some) - 1 for some in logs))  # about their own process's mean
    parts = {
        f"two processes of one stack differ by {sigma:.1%} ({modules} modules run twice), and one use in 2000 by more "
        "than this": processes,
        f"rounds differ by {rounds:.1%}: {_ROUNDS_SIGMAS:g} sigma of two medians of them": math.exp(
            _ROUNDS_SIGMAS * _TWO_MEDIANS * rounds
        ),
        "as far as two runs of one stack lay apart in this use": noise.apart.get((module, one.name), 1.0),
    }
    derivation = max(parts, key=lambda name: parts[name])
    return parts[derivation], derivation


# --- culprits that are good -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watched:
    """One module that is good and changed, or became slower.

    Attributes:
        signature: what makes two sightings one.
        summary: what was seen, in a sentence without its end.
        evidence: the lines that show it.
        rows: timings that are slower; empty of another change.
        others: modules that depend on this one and changed in the same way, or are slower by it.
    """

    module: str
    cause: Cause
    signature: str
    summary: str
    evidence: tuple[str, ...]
    rows: tuple[TimingChange, ...] = ()
    others: tuple[str, ...] = ()


def name_changed(
    before: Receipts, after: Receipts, own: Sequence[TimingChange], order: Order, red: Collection[str], sides: Sides
) -> tuple[Culprit, ...]:
    """Culprits that are good, slower or changed, in dependency order: one a module, whatever of it changed.

    Args:
        before, after: by module.
        own: timings that are slower beyond the noise and beyond what all share.
        red: modules that are red; neither these nor what depends on them is named.
    """
    found: list[Watched] = []
    slow: dict[str, tuple[TimingChange, ...]] = {}
    for row in own:
        slow[row.module] = (*slow.get(row.module, ()), row)
    for module in sorted((before.keys() & after.keys()) | slow.keys(), key=order.rank):
        if module in red or any(order.depends(module, name) for name in red):
            continue
        sides_of = [side[module] for side in (before, after) if module in side]
        whole = len(sides_of) == 2 and all(receipt.outcome is Outcome.PASS for receipt in sides_of)
        seen = [look(module, *sides_of) for look in _LOOKS] if whole else []
        seen += [_describe_slow(module, slow[module])] if module in slow else []
        for one in filter(None, seen):
            known = (row for row in found if order.depends(module, row.module) and _explains(row, one))
            first = next(known, None)
            if first is None:
                found.append(one)
            elif module not in first.others:
                found[found.index(first)] = replace(first, others=(*first.others, module))
    modules = dict.fromkeys(one.module for one in found)
    return tuple(_name(module, [one for one in found if one.module == module], order, sides) for module in modules)


def _name(module: str, parts: Sequence[Watched], order: Order, sides: Sides) -> Culprit:
    component = sides.stands_on(module)
    cascades = tuple(sorted({name for part in parts for name in part.others}, key=order.rank))
    signature = "; ".join(part.signature for part in parts)
    return Culprit(
        module=ENVIRONMENT if component else module,
        # Why it is slower is worth more than that it is.
        cause=next((part.cause for part in parts if part.cause is not Cause.PERFORMANCE), Cause.PERFORMANCE),
        component=component,
        signature=signature,
        summary=f"{'. '.join(part.summary for part in parts)}.",
        evidence=tuple(line for part in parts for line in part.evidence),
        entry_points=() if module == FIREWALL else USES.get(module, ()),
        next_step=slow_step(module, component, sides, signature),
        cascades=(module, *cascades) if component else cascades,
        green=True,
    )


def name_shared(slowness: Slowness, sides: Sides) -> Culprit:
    """A slowdown that modules share, as a culprit: a lower clock explains no kernel, no compile and no memory."""
    return Culprit(
        module=ENVIRONMENT,
        cause=Cause.PERFORMANCE,
        component=sides.changed[0] if len(sides.changed) == 1 else "",
        signature=f"slower by {slowness.factor:.2f}: {', '.join(slowness.modules)}",
        summary=f"{len(slowness.modules)} of {slowness.timed} modules became slower by the same factor, "
        f"{slowness.factor:.2f}: a lower clock or another load on this machine, or a library that all of them stand on",
        evidence=tuple(map(_describe_timing, slowness.shared)),
        next_step="look at the clocks, the temperature and what else runs on this machine, and time both stacks again; "
        f"stay on {sides.before} if it lasts",
        cascades=slowness.modules,
    )


def _describe_timing(row: TimingChange) -> str:
    times = f"{row.before_ms:.4g} -> {row.after_ms:.4g} ms, ratio {row.ratio:.3f}"
    return f"{row.module} {row.name}: {times}; noise explains {row.noise:.3f} ({row.derivation})"


def _describe_slow(module: str, rows: tuple[TimingChange, ...]) -> Watched:
    # Time on the host has that of the device in it, and is noisier.
    worst = max(rows, key=lambda row: (not row.name.endswith(HOST), row.ratio))
    summary = f"{module} takes {worst.ratio:.2f} times the time of `{worst.name}` (it was {worst.before_ms:.3g} ms and "
    summary += f"is {worst.after_ms:.3g} ms)"
    signature = f"slower: {', '.join(sorted({row.name for row in rows}))}"
    return Watched(module, Cause.PERFORMANCE, signature, summary, tuple(map(_describe_timing, rows)), rows)


def _explains(first: Watched, later: Watched) -> bool:
    """Whether a change of one module explains that of a module that depends on it: the same change, or slower too."""
    slower = bool(later.rows) and (bool(first.rows) or later.module in first.others)
    return slower or first.signature == later.signature


# --- what two receipts show -----------------------------------------------------------------------------------------


def _find_slow_kernel(module: str, before: Receipt, after: Receipt) -> Watched | None:
    """A path that asks for the same, ran a fused kernel and runs a slow one now, on a card of the same capability."""
    known = {row.path: row for row in before.backends} if before.machine.capability == after.machine.capability else {}
    rows = [
        (old, row)
        for row in after.backends
        if (old := known.get(row.path)) is not None and (old.requested, old.claimed) == (row.requested, row.claimed)
        and SLOW_KERNEL in row.observed and SLOW_KERNEL not in old.observed and {*old.observed} - {old.claimed}
    ]  # fmt: skip
    if not rows:
        return None
    fused, now = (", ".join(kernel for kernel in row.observed if kernel != row.claimed) for row in rows[0])
    summary = f"{module} ran by {fused} and runs by {now} now, in {len(rows)} paths; its numbers are right"
    shown = tuple(f"{row.path}: observed {', '.join(was.observed)} -> {', '.join(row.observed)}" for was, row in rows)
    return Watched(module, Cause.SILENT_FALLBACK, f"another kernel: {now}", summary, shown)


def _find_lost_backend(module: str, before: Receipt, after: Receipt) -> Watched | None:
    """A second backend that ran, and reports itself that it cannot be loaded now: what took its paths is right."""
    if before.machine.gpu != after.machine.gpu or before.requested != after.requested:
        return None
    ran = {row.requested for row in before.backends if row.requested in row.observed}
    gone = [row for row in after.backends if row.requested in ran and not row.claimed and not row.observed]
    lost = {row.requested: why for row in gone for why in row.reasons if _UNUSABLE.search(why)}
    if not lost:
        return None
    names = ", ".join(lost)
    summary = f"{module} ran by {names} too, which cannot be loaded now; what takes its paths is right"
    return Watched(module, Cause.SILENT_FALLBACK, f"a backend is lost: {names}", summary, tuple(lost.values()))


def _find_late_compiles(module: str, before: Receipt, after: Receipt) -> Watched | None:
    """Libraries that compiled nothing after warm-up, and do now.

    Only kernels that a receipt names count: the numbers of older receipts hold what another process put into the same
    cache (docs/evidence/fp8: deep_gemm, in healthy cells of 2.20.2).
    """
    if int(before.schema_id.rpartition("/")[2]) < _NAMES_KERNELS:
        return None
    known = {name for name, number in before.jit.after.items() if number > 0} | before.jit.unwatched.keys()
    known |= {row.library for row in before.jit.compiled if row.when == "after"}
    kernels = [row for row in after.jit.compiled if row.when == "after" and row.library not in known]
    if not kernels:
        return None
    late = sorted(Counter(row.library for row in kernels).items())
    signature = f"compiled after warm-up: {', '.join(name for name, _ in late)}"
    numbers = ", ".join(f"{name} {number}" for name, number in late)
    summary = f"{module} compiles in its second use what it had compiled in its first: {numbers}"
    shown = tuple(dict.fromkeys(f"{row.library}: {row.kernel} {row.shape}".strip() for row in kernels))
    return Watched(module, Cause.PERFORMANCE, signature, summary, shown)


def _find_memory(module: str, before: Receipt, after: Receipt) -> Watched | None:
    """More memory at the peak, of the same checks with the same numbers on the same kind of card."""
    same = (
        before.machine.gpu == after.machine.gpu != "" and before.seed == after.seed
        and {check.name for check in before.checks} == {check.name for check in after.checks}
    )  # fmt: skip
    old, new = before.peak_memory_mib, after.peak_memory_mib
    if not same or old <= 0.0 or new <= max(old * MEMORY_RATIO, old + MEMORY_RISE_MIB):
        return None
    summary = (
        f"{module} holds {new / old:.2f} times the GPU memory at its peak (it was {old:.0f} MiB and is {new:.0f} MiB)"
    )
    shown = f"peak of torch's allocator: {old:g} -> {new:g} MiB; noise explains {MEMORY_RATIO:.2f} times"
    return Watched(module, Cause.PERFORMANCE, "more memory at its peak", summary, (shown,))


_LOOKS: Final[tuple[Callable[[str, Receipt, Receipt], Watched | None], ...]] = (
    _find_slow_kernel, _find_lost_backend, _find_late_compiles, _find_memory,
)  # fmt: skip
