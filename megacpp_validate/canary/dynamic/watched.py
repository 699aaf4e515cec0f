"""What changed in a cell that is good on both sides, and no check holds: a slower kernel, late compiles, memory.

Each is a fact of two receipts, and none needs the noise of a card: which kernel ran, how many were compiled after
warm-up, and what an allocator held at its peak, which two runs of one cell and seed hold alike. What became slower is
joined to it: one module is one culprit, whatever of it changed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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
