"""What became worse in a module that is good on both sides: time, kernels, late compiles, memory. No check shows it.

Medians of times are compared: a use is slower beyond the most that healthy runs differ by, where each of its rounds is
longer than each one before. The rest is read from two receipts without any noise: which kernel ran, which kernels were
compiled after warm-up, and the peak of the allocator.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ...diagnosis.blame import Order
from ...diagnosis.checks import FIREWALL, USES
from ...diagnosis.culprits import Culprit
from ...diagnosis.next_steps import Receipts, Sides, slow_step
from ...evidence.receipt import DEVICE_CLOCK, Machine, Outcome, Receipt, Timing, memory_limit
from ...evidence.values import ENVIRONMENT, Cause, Frozen

# Times on the host are shown and blame nobody: on a clean step (2.17.1 to 2.20.2, four stacks at
# once on one H200, 2026-11-28) a scope took 1.71 times as long on the host.
FEWEST_ROUNDS: Final = 3
# Ratios of two healthy runs. On one H200 (docs/evidence/h200), device times of one stack and of healthy releases differ
# by up to 1 %.
DEVICE_NOISE: Final = 1.10
UNMEASURED_NOISE: Final = 1.20  # of a card that ran no stack twice
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

Card = tuple[str, str, str]
"""Host, GPU, driver."""
Noise = Mapping[tuple[Card, str, str], float]
"""How far two runs of one stack on a card lie apart: ratio, the larger over the smaller, by card, module and use."""


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


def measure_noise(first: Receipts, again: Receipts) -> Noise:
    """The noise of the card that two runs of one stack ran on; empty where they did not share one.

    Args:
        first, again: receipts of one stack, of two runs.
    """
    apart = {}
    for module in first.keys() & again.keys():
        one, other = first[module], again[module]
        if one.stack == other.stack and _card(one.machine) == _card(other.machine):
            for before, after in _pairs(one, other):
                ratio = after.median_ms / before.median_ms
                apart[_card(one.machine), module, before.name] = max(ratio, 1.0 / ratio)
    return apart


def compare_timings(before: Receipts, after: Receipts, noise: Noise) -> tuple[TimingChange, ...]:
    """Every use that was timed on both sides, in the order of `after`.

    A use is slower if the ratio of its medians is beyond the noise and every round of `after` took longer than every
    round of `before`. A row that cannot be compared has `noise` 0.
    """
    pairs = [(name, *pair) for name in after if name in before for pair in _pairs(before[name], after[name])]
    timed = {module for module, one, _ in pairs if one.clock == DEVICE_CLOCK}
    rows: list[TimingChange] = []
    for module, one, other in pairs:
        cards = _card(before[module].machine), _card(after[module].machine)
        bound, derivation = _find_bound(module, cards, one, other, noise, many=len(timed) >= FEWEST_SHARING)
        ratio = other.median_ms / one.median_ms
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
    with every use. A use that is slower than the shared factor by more than its noise stays its module's own.
    """
    slower = [row for row in changes if row.slower]
    logs: dict[str, list[float]] = {}
    for row in (row for row in changes if row.noise >= 1.0):
        logs.setdefault(row.module, []).append(math.log(row.ratio))
    if len(logs) >= FEWEST_SHARING and slower:
        middle = statistics.median(map(statistics.median, logs.values()))
        sharing = tuple(name for name, found in logs.items() if middle > 0.0 and min(found) >= middle / 2.0)
        if len(sharing) >= max(FEWEST_SHARING, len(logs) - MOST_SPARED):
            factor, apart = math.exp(middle), logs.keys() - set(sharing)
            rows = tuple(row for row in slower if row.module not in apart and row.ratio <= factor * row.noise)
            return Slowness(tuple(row for row in slower if row not in rows), factor, sharing, len(logs), rows)
    return Slowness(tuple(slower))


def _card(machine: Machine) -> Card:
    return machine.host, machine.gpu, machine.driver


def _pairs(before: Receipt, after: Receipt) -> list[tuple[Timing, Timing]]:
    """Uses that took time in both."""
    known = {timing.name: timing for timing in before.timings if timing.median_ms > 0.0}
    return [(known[timing.name], timing) for timing in after.timings if timing.name in known and timing.median_ms > 0.0]


def _find_bound(
    module: str, cards: tuple[Card, Card], one: Timing, other: Timing, noise: Noise, *, many: bool
) -> tuple[float, str]:
    """The largest ratio that noise explains, and where it comes from; 0 where two timings cannot be compared.

    Args:
        many: enough modules are timed to tell a slow card from a slow module.
    """
    old, new = (f"{gpu or 'the CPU'} of {host or 'an unknown host'} {driver}".strip() for host, gpu, driver in cards)
    if cards[0] != cards[1]:
        return 0.0, f"not compared: before it ran on {old}, now on {new}"
    if one.clock != other.clock:
        return 0.0, f"not compared: before it was timed by {one.clock}, now by {other.clock}"
    if one.clock != DEVICE_CLOCK:
        return 0.0, "not compared: the host stretches times by what else it runs"
    if min(len(one.rounds_ms), len(other.rounds_ms)) < FEWEST_ROUNDS:
        return 0.0, f"not compared: fewer than {FEWEST_ROUNDS} rounds were timed"
    if any(card == cards[0] for card, _, _ in noise):
        apart = noise.get((cards[0], module, one.name), 1.0)
        if apart > DEVICE_NOISE:
            return apart, "two runs of one stack lay as far apart in this use"
        return DEVICE_NOISE, "healthy runs on one card differ by less"
    if many and not noise:
        return UNMEASURED_NOISE, "healthy runs differ by less; no stack was run twice on this card"
    return 0.0, "not compared: no stack was run twice on this card, so its noise is unknown"


# --- culprits that are good -----------------------------------------------------------------------------------------


@dataclass
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
    others: list[str] = field(default_factory=list)


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
            first = next((row for row in found if order.depends(module, row.module) and _explains(row, one)), None)
            if first is None:
                found.append(one)
            else:
                first.others.append(module)
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
        evidence=tuple(map(describe_timing, slowness.shared)),
        next_step="look at the clocks, the temperature and what else runs on this machine, and time both stacks again; "
        f"stay on {sides.before} if it lasts",
        cascades=slowness.modules,
    )


def describe_timing(row: TimingChange) -> str:
    """One use before and after, beside the noise, as culprits and steps list it."""
    times = f"{row.before_ms:.4g} -> {row.after_ms:.4g} ms, ratio {row.ratio:.3f}"
    return f"{row.module} {row.name}: {times}; noise explains {row.noise:.3f} ({row.derivation})"


def _describe_slow(module: str, rows: tuple[TimingChange, ...]) -> Watched:
    # Time on the host has that of the device in it, and is noisier.
    worst = max(rows, key=lambda row: row.ratio)
    summary = f"{module} takes {worst.ratio:.2f} times the time of `{worst.name}` (it was {worst.before_ms:.3g} ms and "
    summary += f"is {worst.after_ms:.3g} ms)"
    signature = f"slower: {', '.join(sorted({row.name for row in rows}))}"
    return Watched(module, Cause.PERFORMANCE, signature, summary, tuple(map(describe_timing, rows)), rows)


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

    Only kernels that a receipt names count: a number alone may hold what another process put into the same cache.
    """
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
    if not same or old <= 0.0 or new <= memory_limit(old, MEMORY_RATIO, MEMORY_RISE_MIB):
        return None
    summary = (
        f"{module} holds {new / old:.2f} times the GPU memory at its peak (it was {old:.0f} MiB and is {new:.0f} MiB)"
    )
    shown = f"peak of torch's allocator: {old:g} -> {new:g} MiB; noise explains {MEMORY_RATIO:.2f} times"
    return Watched(module, Cause.PERFORMANCE, "more memory at its peak", summary, (shown,))


_LOOKS: Final[tuple[Callable[[str, Receipt, Receipt], Watched | None], ...]] = (
    _find_slow_kernel, _find_lost_backend, _find_late_compiles, _find_memory,
)  # fmt: skip
