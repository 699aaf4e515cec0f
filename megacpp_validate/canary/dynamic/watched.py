"""What changed in a cell that is good on both sides, and no check holds: a slower kernel, late compiles, memory.

Each is a fact of two receipts, and none needs the noise of a card: which kernel ran, how many were compiled after
warm-up, and what an allocator held at its peak, which two runs of one cell and seed hold alike. What became slower is
joined to it: one module is one culprit, whatever of it changed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ...diagnosis.blame import Order
from ...diagnosis.checks import FIREWALL, SHARED_PARTS, USES, of_module
from ...diagnosis.culprits import Culprit, Sides
from ...diagnosis.next_steps import slow_step
from ...evidence.receipt import Backend, Outcome, Receipt
from ...evidence.values import ENVIRONMENT, Cause
from .slowdown import HOST, SharedSlowdown
from .upgrade_result import TimingChange

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


@dataclass(frozen=True)
class Watched:
    """One module that changed so, and what stands on it and did, too.

    Attributes:
        signature: what makes two sightings one.
        summary: what was seen, in a sentence without its end.
        evidence: the lines that show it.
        accepting: what a person accepts who goes on with it.
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


@dataclass(frozen=True)
class Slow:
    """One module that became slower by itself.

    Attributes:
        others: modules that are slower by it.
        changes: its own rows.
    """

    module: str
    changes: tuple[TimingChange, ...]
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Green:
    """One module that is good, and changed so, or is slower, or both: one culprit.

    Attributes:
        watched: in the order in which they are looked for.
        slow: its own slowness, and that of modules which changed by it.
        others: what is filed under it, in dependency order.
    """

    module: str
    watched: tuple[Watched, ...]
    slow: tuple[Slow, ...]
    others: tuple[str, ...]


def find_watched(
    before: Mapping[str, Receipt], after: Mapping[str, Receipt], order: Order, red: Collection[str]
) -> tuple[Watched, ...]:
    """Everything of the kind, in dependency order.

    Args:
        before, after: by module.
        red: modules that are red: what stands on one may take another path by it, and is not named for that.
    """
    found: list[Watched] = []
    for module in sorted(before.keys() & after.keys(), key=order.rank):
        one, other = before[module], after[module]
        whole = one.outcome is Outcome.PASS and other.outcome is Outcome.PASS
        if not whole or any(order.depends(module, name) for name in red):
            continue
        for look in _LOOKS:
            if (seen := look(module, one, other)) is not None:
                _file(seen, found, order)
    return tuple(found)


def _file(seen: Watched, found: list[Watched], order: Order) -> None:
    """Under the first module that it stands on and that changed in the same way, else by itself."""
    for index, first in enumerate(found):
        if first.signature == seen.signature and order.depends(seen.module, first.module):
            others = (*first.others, seen.module)
            found[index] = replace(first, others=others)
            return
    found.append(seen)


def join_slow(watched: Sequence[Watched], slow: Sequence[Slow], order: Order) -> tuple[Green, ...]:
    """What changed and what is slower, by the module that is to blame, in dependency order.

    A slower kernel and late compiles tell why a module is slower: its time is told with them, where it was the first to
    change so, or under the first. Memory explains no time.
    """
    heads: dict[str, str] = {}
    for one in watched:
        if one.explains_time:
            for name in (one.module, *one.others):
                heads.setdefault(name, one.module)
    of_head: dict[str, list[Slow]] = {}
    for late in slow:
        of_head.setdefault(heads.get(late.module, late.module), []).append(late)
    found: list[Green] = []
    for module in sorted({one.module for one in watched} | of_head.keys(), key=order.rank):
        mine, its = tuple(one for one in watched if one.module == module), tuple(of_head.get(module, ()))
        others = {name for one in mine for name in one.others}
        others |= {name for one in its for name in (one.module, *one.others)}
        found.append(Green(module, mine, its, tuple(sorted(others - {module}, key=order.rank))))
    return tuple(found)


def name_green(
    watched: Sequence[Watched], own: Sequence[TimingChange], timed: Sequence[TimingChange], order: Order,
    red: Collection[str], sides: Sides,
) -> tuple[Culprit, ...]:  # fmt: skip
    """Culprits that are good, slower or changed, in dependency order.

    Args:
        watched: what changed.
        own: timings that are slower beyond the noise and beyond what all share.
        timed: every timing.
        red: red modules.
    """
    return tuple(_name_green(green, sides) for green in join_slow(watched, file_slow(own, order, red, timed), order))


def name_shared(shared: SharedSlowdown, sides: Sides) -> Culprit:
    """A slowdown that modules share, as a culprit: a lower clock explains no kernel, no compile and no memory."""
    return Culprit(
        module=ENVIRONMENT,
        cause=Cause.PERFORMANCE,
        component=sides.changed[0] if len(sides.changed) == 1 else "",
        signature=f"slower by {shared.factor:.2f}: {', '.join(shared.modules)}",
        summary=shared.summary,
        evidence=tuple(map(say_timing, shared.changes)),
        next_step="look at the clocks, the temperature and what else runs on this machine, and time both stacks again; "
        f"stay on {sides.facts.before} if it lasts",
        cascades=shared.modules,
    )


def say_timing(row: TimingChange) -> str:
    """A timing in a line."""
    bound = f"believed of noise: {row.noise:.3f} ({row.derivation})" if row.noise else row.derivation
    return f"{row.module} {row.name}: {row.before_ms:.4g} -> {row.after_ms:.4g} ms, ratio {row.ratio:.3f}; {bound}"


def _name_green(green: Green, sides: Sides) -> Culprit:
    parts = (*green.watched, *map(_read_slow, green.slow))
    component = sides.stands_on(green.module)
    accepting = " and ".join(part.accepting for part in parts)
    return Culprit(
        module=ENVIRONMENT if component else green.module,
        # Why it is slower tells more than that it is.
        cause=next((part.cause for part in parts if part.cause is not Cause.PERFORMANCE), Cause.PERFORMANCE),
        component=component,
        signature="; ".join(part.signature for part in parts),
        summary=f"{'. '.join(part.summary for part in parts)}.",
        evidence=tuple(line for part in parts for line in part.evidence),
        entry_points=() if green.module == FIREWALL else USES.get(green.module, ()),
        next_step=slow_step(green.module, component, replace(sides.facts, held=True), accepting),
        cascades=(green.module, *green.others) if component else green.others,
        green=True,
    )


def _read_slow(slow: Slow) -> Watched:
    # Time on the host has that of the device in it, and is noisier.
    worst = max(slow.changes, key=lambda row: (not row.name.endswith(HOST), row.ratio))
    slowest = f"{worst.ratio:.2f} times the time of `{worst.name}`"
    return Watched(
        slow.module,
        Cause.PERFORMANCE,
        f"slower: {', '.join(sorted({row.name for row in slow.changes}))}",
        f"{slow.module} takes {slowest} (it was {worst.before_ms:.3g} ms and is {worst.after_ms:.3g} ms)",
        tuple(map(say_timing, slow.changes)),
        slowest,
    )


def file_slow(
    own: Sequence[TimingChange], order: Order, red: Collection[str], timed: Sequence[TimingChange] = ()
) -> tuple[Slow, ...]:
    """Every slower module filed under the first that it stands on and that is slower in the same way.

    Args:
        own: rows that are slower beyond the noise and beyond what all share.
        red: red modules: what is red is not slow as well, and what stands on it may be slow by another path.
        timed: every row: what is timed and not slower tells what a slower one is slower by.
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
        cause = next(
            (one for one in slow if order.depends(module, one) and _slows(one, rows[one], module, rows, held)), None
        )
        if cause is None:
            slow[module] = []
        else:
            slow[cause].append(module)
    return tuple(Slow(module, tuple(rows[module]), tuple(others)) for module, others in slow.items())


def _slows(
    cause: str, its: Sequence[TimingChange], module: str, rows: Mapping[str, Sequence[TimingChange]],
    held: frozenset[tuple[str, str]],
) -> bool:  # fmt: skip
    """Whether what is slower in one module makes every row of another slower."""
    if cause != FIREWALL and not _share(cause, module) and not _share_part(cause, its, module, held):
        return False
    # What the scope costs the host is paid by whatever is run in it, on the device too, which waits for the host.
    low = all(_is_low(row.name) for row in its)
    backward = all(_is_of_backward(row, held) for row in its)
    return all(
        (cause != FIREWALL or row.name.endswith(HOST) or _is_low(row.name))
        and (_is_low(row.name) or not low)
        and (not backward or "backward" in _words(row))
        for row in rows[module]
    )


def _share_part(
    cause: str, its: Sequence[TimingChange], module: str, held: frozenset[tuple[str, str]]
) -> bool:  # fmt: skip
    """Whether both run one part of Transformer Engine, and no use of the device that runs it is as fast as it was.

    As of numbers that are wrong (shared_layers.py): every entry point that runs the shared code must show it.
    """
    mine, theirs = (of_module(name) or frozenset() for name in (cause, module))
    low = all(_is_low(row.name) for row in its)
    for part in SHARED_PARTS:
        if not (part.shows & mine and part.shows & theirs):
            continue
        fast = (
            name
            for other, name in held
            if part.shows & (of_module(other) or frozenset()) and not name.endswith(HOST)
            and (not low or _is_low(name))
        )  # fmt: skip
        if not any(fast) and part.shows & mine == mine:
            return True
    return False


def _is_of_backward(row: TimingChange, held: frozenset[tuple[str, str]]) -> bool:
    """Whether the backward pass alone is slower: a use of both passes is where its forward pass by itself is not."""
    words = _words(row)
    if "backward" not in words:
        return False
    alone = row.name.replace("forward-backward", "forward")
    return "forward" not in words or (row.module, alone) in held


def _share(one: str, other: str) -> bool:
    mine, theirs = of_module(one), of_module(other)
    return mine is None or theirs is None or bool(mine & theirs)


def _words(row: TimingChange) -> frozenset[str]:
    return frozenset(re.split(r"[.-]", row.name))


def _is_low(name: str) -> bool:
    """Whether a use is of a low precision: of "bf16.block.forward" the block is no recipe."""
    words = frozenset(re.split(r"[.-]", name))
    return bool(words & _LOW) and not words & _HIGH


def _find_slow_kernel(module: str, before: Receipt, after: Receipt) -> Watched | None:
    """A path that asks for the same, ran a fused kernel and runs a slow one now, on a card of the same capability."""
    if before.machine.capability != after.machine.capability:
        return None
    known = dict(_paths(before))
    rows = [
        (row, old)
        for path, row in _paths(after)
        if (old := known.get(path)) is not None and (old.requested, old.claimed) == (row.requested, row.claimed)
        and SLOW_KERNELS & {*row.observed} and not SLOW_KERNELS & {*old.observed} and {*old.observed} - {old.claimed}
    ]  # fmt: skip
    if not rows:
        return None
    first, old = rows[0]
    fused, now = (", ".join(kernel for kernel in row.observed if kernel != row.claimed) for row in (old, first))
    return Watched(
        module,
        Cause.SILENT_FALLBACK,
        f"another kernel: {now}",
        f"{module} ran by {fused} and runs by {now} now, in {len(rows)} paths; its numbers are right",
        tuple(f"{row.path}: observed {', '.join(was.observed)} -> {', '.join(row.observed)}" for row, was in rows),
        f"that {module} runs by {now}",
        explains_time=True,
    )


def _find_lost_backend(module: str, before: Receipt, after: Receipt) -> Watched | None:
    """A second backend that answered, and says itself that it cannot be loaded now: what took its paths is right.

    One that is not installed at all is another environment, and no fault of it.
    """
    if before.machine.gpu != after.machine.gpu or before.requested != after.requested:
        return None
    answered = {row.requested for row in before.backends if row.requested in row.observed}
    lost = [
        (row, why) for row in after.backends
        if row.requested in answered and not row.claimed and not row.observed
        and (why := next((one for one in row.reasons if _UNUSABLE.search(one)), ""))
    ]  # fmt: skip
    if not lost:
        return None
    names = ", ".join(dict.fromkeys(row.requested for row, _ in lost))
    return Watched(
        module,
        Cause.SILENT_FALLBACK,
        f"a backend is lost: {names}",
        f"{module} ran by {names} too, which cannot be loaded now; what takes its paths is right",
        tuple(dict.fromkeys(why for _, why in lost)),
        f"that {module} runs without {names}",
        explains_time=True,
    )


def _paths(receipt: Receipt) -> Iterator[tuple[str, Backend]]:
    """Paths that one row alone is of: of several with one name nobody knows which is which."""
    paths = [row.path for row in receipt.backends]
    return ((row.path, row) for row in receipt.backends if paths.count(row.path) == 1)


def _find_late_compiles(module: str, before: Receipt, after: Receipt) -> Watched | None:
    """Libraries that compiled nothing after warm-up, and do now.

    Kernels count, and no numbers by themselves: until receipts named each kernel (schema 5), what another process put
    into the same cache was counted, too (docs/evidence/fp8: deep_gemm, in healthy cells of 2.20.2). So before must name
    them, and what it lists of training ranks, or says that nobody watched, is not new.
    """
    if int(before.schema_id.rpartition("/")[2]) < _NAMES_KERNELS:
        return None
    known = {name for name, number in before.jit.after.items() if number > 0} | before.jit.unwatched.keys()
    known |= {row.library for row in before.jit.compiled if row.when == "after"}
    kernels = [row for row in after.jit.compiled if row.when == "after" and row.library not in known]
    late = Counter(row.library for row in kernels)
    if not late:
        return None
    told = ", ".join(f"{name} {number}" for name, number in sorted(late.items()))
    return Watched(
        module,
        Cause.PERFORMANCE,
        f"compiled after warm-up: {', '.join(sorted(late))}",
        f"{module} compiles in its second use what it had compiled in its first: {told}",
        tuple(dict.fromkeys(f"{row.library}: {row.kernel} {row.shape}".strip() for row in kernels)),
        "a compile in the middle of a run",
        explains_time=True,
    )


def _find_memory(module: str, before: Receipt, after: Receipt) -> Watched | None:
    """More memory at the peak, of the same checks with the same numbers on the same kind of card."""
    same = (
        before.machine.gpu == after.machine.gpu != "" and before.seed == after.seed
        and {check.name for check in before.checks} == {check.name for check in after.checks}
    )  # fmt: skip
    old, new = before.peak_memory_mib, after.peak_memory_mib
    if not same or old <= 0.0 or new <= max(old * MEMORY_RATIO, old + MEMORY_RISE_MIB):
        return None
    return Watched(
        module,
        Cause.PERFORMANCE,
        "more memory at its peak",
        f"{module} holds {new / old:.2f} times the GPU memory at its peak (it was {old:.0f} MiB and is {new:.0f} MiB)",
        (
            f"peak of torch's allocator: {old:g} -> {new:g} MiB; no noise is more than {MEMORY_RATIO:.2f} times and "
            f"more than {MEMORY_RISE_MIB:g} MiB, four workspaces of cuBLAS",
        ),
        f"{new / old:.2f} times the memory",
    )


_LOOKS: Final[tuple[Callable[[str, Receipt, Receipt], Watched | None], ...]] = (
    _find_slow_kernel, _find_lost_backend, _find_late_compiles, _find_memory,
)  # fmt: skip
