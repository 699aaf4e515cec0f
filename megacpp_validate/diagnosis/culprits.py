"""Culprits: cases of red modules with cause, component, evidence and next step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Final

from ..catalog.bridge import BridgeModule
from ..catalog.images import Needs
from ..evidence.receipt import Check, Outcome, Receipt
from ..evidence.values import ENVIRONMENT, Cause, Frozen
from .blame import Case, Change, Order, Red, file_reds, find_blockers, is_red, merge_cases, read_order, share_cases
from .checks import FIREWALL, USES
from .diagnose import Diagnosis, diagnose, find_host_fault
from .next_steps import Sides, next_step, second_copies, version_of
from .rows import component_named

NEW: Final = frozenset({Change.REGRESSED, Change.NEW})
_LISTED: Final = 3
_LONGEST: Final = 600
_QUOTED: Final = 200  # characters of an exception in the summary; the evidence has it whole
# What NVTE_ERROR puts before its message (transformer_engine/common/util/logging.h); the evidence keeps it.
_PLACE: Final = re.compile(r"^\S+\.\w+:\d+ in function [\w:~<>]+(?:\([^)]*\))?: ")
# Causes that a combination of modules can have. Machines, libraries and time limits are not faults of a combination.
_OF_MODULES: Final = frozenset({Cause.API, Cause.NUMERICS, Cause.SILENT_FALLBACK})


class Culprit(Frozen):
    """One cause, with everything that is filed under it.

    Attributes:
        module: the first module in dependency order with this failure; `ENVIRONMENT` where several modules share it.
        cause: class of the cause.
        component: at fault below Transformer Engine: "cuDNN", "cuBLAS", "CUDA runtime", "torch ABI", "flash-attn";
            empty for Transformer Engine and the bridge.
        signature: identity of the failure.
        summary: what was observed, in a sentence.
        evidence: exception, frame, checks out of bounds, versions that differ, timings.
        entry_points: of Transformer Engine, by the names of the bridge.
        next_step: what to do.
        cascades: modules that are red, slower or changed because of the culprit, in dependency order.
        green: every check passed; time, kernel, memory or late compiles changed.
    """

    module: str
    cause: Cause
    component: str = ""
    signature: str
    summary: str
    evidence: tuple[str, ...] = ()
    entry_points: tuple[str, ...] = ()
    next_step: str
    cascades: tuple[str, ...] = ()
    green: bool = False

    @property
    def is_slowdown(self) -> bool:
        """Whether the module is only slower: its evidence is timings."""
        return self.cause is Cause.PERFORMANCE and self.signature.startswith("slower")


def blame_receipts(
    receipts: Sequence[Receipt], modules: Sequence[BridgeModule], needs: Needs | None
) -> tuple[Culprit, ...]:
    """The culprits of the red receipts of one stack, without a comparison: for the release gate.

    Every red receipt becomes a culprit or a cascade; faults of the host have no culprit.

    Args:
        receipts: of one stack on one target; of several receipts of a probe the red one counts.
        modules: in dependency order.
        needs: requirements of releases.
    """
    found = {one.probe: one for one in sorted(receipts, key=is_red)}
    hosts = {name for name, one in found.items() if find_host_fault(one)}
    out = hosts | {name for name, behind in find_blockers(found, hosts).items() if behind is None}
    seen = {name: one for name, one in found.items() if name not in out}
    order = read_order(modules)
    files = {module.id: tuple(module.files) for module in modules}
    sides = Sides("an earlier stack", receipts[0].stack if receipts else "", files=files, needs=needs)
    reds = [Red(name, one) for name, one in seen.items() if is_red(one)]
    culprits, _ = name_culprits(file_cases(reds, seen, order, sides), seen, order, sides)
    culprits.sort(key=lambda row: (row.module != ENVIRONMENT, order.rank(row.module)))
    named = {name for row in culprits for name in (row.module, *row.cascades)}
    return (*culprits, *(_name_alone(one) for one in receipts if is_red(one) and one.probe not in named))


def _name_alone(receipt: Receipt) -> Culprit:
    """A red cell without a culprit: a composition, or a fault of the host."""
    found = diagnose(receipt)
    return Culprit(
        module=receipt.probe, cause=found.cause, component=found.component, signature="", summary=receipt.reason,
        next_step="read its receipt; `nox -s te_bisect` finds the change that broke it",
    )  # fmt: skip


def file_cases(reds: Sequence[Red], seen: Mapping[str, Receipt], order: Order, sides: Sides) -> tuple[Case, ...]:
    """Red modules by cause; a shared part of Transformer Engine, or a shared component below it, is one case."""
    cases = share_cases(file_reds(reds, seen, order), order)
    if not sides.changed:
        return cases
    # Same release, another version below it: that version is at fault, whatever the failures say.
    groups: dict[str, list[Case]] = {}
    kept: list[Case] = []
    for case in cases:
        if case.first.change in NEW and not case.first.fits_no_call:
            groups.setdefault(case.first.diagnosis.component or sides.stands_on(case.first.module), []).append(case)
        else:
            kept.append(case)
    return (*kept, *(merge_cases(group, component, order) for component, group in groups.items()))


def name_culprits(
    cases: Sequence[Case], seen: Mapping[str, Receipt], order: Order, sides: Sides
) -> tuple[list[Culprit], dict[str, str]]:
    """Culprits, and module -> its culprit. A failure that existed before has no culprit.

    Args:
        seen: receipts of all modules.
    """
    culprits: list[Culprit] = []
    under: dict[str, str] = {}
    for case in cases:
        first = case.first
        under |= dict.fromkeys((red.module for red in case.filed), case.name)
        # A red composition that did not run before is no regression.
        first_seen = first.module not in order.names and (
            first.before is None or first.before.outcome is Outcome.NOT_RUN
        )
        if first.change in NEW and not first_seen:
            culprits.append(_name_boundary(_name_culprit(case, sides), case, seen, sides.before))
    return culprits, under


def _name_boundary(culprit: Culprit, case: Case, seen: Mapping[str, Receipt], before: str) -> Culprit:
    """A red composition without a red module or a component gets the cause BOUNDARY; any other culprit stays."""
    red = [name for name in USES if is_red(seen.get(name))]
    if red or culprit.component or case.name != case.first.module or culprit.cause not in _OF_MODULES:
        return culprit
    if all(name in seen and seen[name].outcome.is_good for name in USES):
        says = "Each bridge module passes alone: the fault lies in their combination."
        step = "turn features off one by one in both releases (`nox -s ablate`): the pair of modules without which "
        step += f"the run passes is incompatible; stay on {before} until then"
    elif culprit.cause is Cause.API and case.first.raised is None:  # a contract of the composition
        says = "Not every bridge module was run beside it: the fault may lie in one module or in their combination."
        step = f"run the bridge modules in both releases first (`nox -s h200_parity`); stay on {before} until then"
    else:
        return culprit
    summary = f"{culprit.summary} {says}"
    return culprit.model_copy(update={"cause": Cause.BOUNDARY, "summary": summary, "next_step": step})


def _name_culprit(case: Case, sides: Sides) -> Culprit:
    """The culprit of a case."""
    first, diagnosis = case.first, case.first.diagnosis
    if case.shared is not None:
        cause = diagnosis.cause if diagnosis.component == case.shared and not sides.changed else Cause.ENVIRONMENT
        diagnosis = Diagnosis(cause, case.shared, diagnosis.missing)
    cascades = tuple(red.module for red in case.filed)
    return Culprit(
        module=case.name,
        cause=diagnosis.cause,
        component=diagnosis.component,
        signature=str(first.signature),
        summary=_summary(case, diagnosis, sides.before),
        evidence=_evidence(first, diagnosis, sides),
        entry_points=_entry_points(case),
        next_step=next_step(first, diagnosis, sides, cascades),
        cascades=cascades,
    )


def _summary(case: Case, diagnosis: Diagnosis, before: str) -> str:
    """What was observed, and the result of the module in the first stack."""
    first, raised = case.first, case.first.raised
    others = f" (and {len(case.members) - 1} more modules)" if case.shared is not None and case.others else ""
    who = f"{first.module}{others}"
    below = f" in {diagnosis.component}" if diagnosis.component else ""
    if first.module != first.receipt.probe:
        what = f"{who} leaves the low-precision scope, as the probe of {first.receipt.probe} observes"
    elif raised is not None and raised.died:
        what = f"{who} ends its process with {raised.kind}{f' in {raised.frame}' if raised.frame else ''}"
    elif raised is not None:
        said = shorten(_PLACE.sub("", raised.text), _QUOTED, placeholder="…").rstrip(".")
        what = f"{who} raises {raised.kind}{below}: {said}"
    else:
        what = f"{who} fails {len(first.checks)} of {len(first.receipt.checks)} checks{below}"
    part = f" All layers that run {case.part.name} ({case.part.where}) are wrong." if case.part is not None else ""
    old = first.before.outcome if first.before is not None else Outcome.NOT_RUN
    known = {
        Outcome.NOT_RUN: f" {first.module} has no result on {before}, so the failure may be older.",
        Outcome.BLOCKED: f" Another cell blocked it on {before}.",
    }
    end = "" if what.endswith("…") else "."
    return f"{what}{end}{part}{known.get(old, '' if first.was_good else f' On {before} it failed in another way.')}"


def _evidence(red: Red, diagnosis: Diagnosis, sides: Sides) -> tuple[str, ...]:
    """Evidence of a failure: exception and frames, checks, backends, versions."""
    lines: list[str] = []
    if red.raised is not None:
        frames = (red.raised.frame, *red.raised.bridge[-1:])
        lines.append(shorten(red.raised.line, _LONGEST, placeholder="…"))
        lines += [f"frame: {frame}" for frame in frames if frame]
    checks = [check for check in red.receipt.checks if not check.passed]
    lines += [f"check {_describe_check(check)}" for check in checks[:_LISTED]]
    if diagnosis.cause is Cause.SILENT_FALLBACK:
        lines += [
            f"{row.path}: requested {row.requested}, claimed {row.claimed or 'none'}, "
            f"observed {', '.join(row.observed) or 'nothing'} {' '.join(row.reasons[:1])}"
            for row in red.fallbacks[:_LISTED]
        ]
    if version := version_of(diagnosis.component, red.receipt):
        lines.append(f"{diagnosis.component} as loaded: {version}")
    copies = [row for row in second_copies(red.receipt) if row.name in component_named(diagnosis.component).loaded]
    lines += [f"{row.name} has two copies: {' and '.join((row.kept, *row.others))}" for row in copies]
    lines += [f"{row.name}: {row.before or 'not loaded'} -> {row.after or 'not loaded'}" for row in sides.versions]
    return tuple(dict.fromkeys(lines))


def _describe_check(check: Check) -> str:
    parts = [f"{part.name} {part.observed} against {part.bound}" for part in check.parts if not part.passed]
    return f"{check.name}: {'; '.join(parts[:2]) or shorten(check.detail, _QUOTED, placeholder='…') or 'failed'}"


def _entry_points(case: Case) -> tuple[str, ...]:
    """Accessors that the failure names, else all accessors of its module."""
    red = case.first
    if named := case.part.shows if case.part is not None else red.entries:
        order = (*USES.get(red.module, ()), *(name for names in USES.values() for name in names))
        return tuple(dict.fromkeys(name for name in order if name in named))
    return () if red.module == FIREWALL else USES.get(red.module, ())
