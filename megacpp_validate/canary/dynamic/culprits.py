"""A case told as a culprit: its class, component, evidence and next step, from the receipts of both sides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ...evidence.receipt import Check, Outcome, Receipt
from ...evidence.values import ENVIRONMENT, Cause
from .blame import Case
from .causes import Diagnosis
from .entries import USES, entries_in
from .explain import FIREWALL
from .failed_checks import CheckKind
from .next_steps import Facts, next_step, slow_step
from .performance import Slow
from .red import Red
from .slowdown import HOST
from .upgrade_result import Culprit, TimingChange
from .versions import second_copies, shorter, version_of
from .watched import Green, Watched

_LISTED: Final = 3
_LONGEST: Final = 600
_QUOTED: Final = 200  # characters of an exception in the summary; the evidence has it whole
# What NVTE_ERROR puts before its message (transformer_engine/common/util/logging.h); the evidence keeps it.
_PLACE: Final = re.compile(r"^\S+\.\w+:\d+ in function [\w:~<>]+(?:\([^)]*\))?: ")
# Where nothing that failed names what is at fault, and several libraries changed: what a module stands on first.
_STANDS_ON: Final[dict[str, tuple[str, ...]]] = {
    "attention": ("cuDNN", "flash-attn", "torch"),
    "native_block": ("cuBLAS", "cuDNN", "torch"),
    "linear_walker": ("cuBLAS", "torch"),
    "expert_gemm": ("cuBLAS", "DeepGEMM", "torch"),
    "permute": ("triton", "torch"),
    "layer_spec": ("cuBLAS", "torch"),
    "imports": ("torch", "cuBLAS"),
}


@dataclass(frozen=True)
class Sides:
    """Both sides of a step.

    Attributes:
        facts: what next steps are told of; `held` and `files` are set for each culprit.
        changed: components of another version while the release of Transformer Engine is the same; empty otherwise.
        files: bridge files by module.
    """

    facts: Facts
    before: Mapping[str, Receipt] = field(repr=False)
    changed: tuple[str, ...] = ()
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)


def component_of(red: Red, changed: Sequence[str]) -> str:
    """The component that is at fault where the release is the same and these components are not."""
    own = red.diagnosis.component
    if own in changed or not changed:
        return own
    if own == "torch ABI" and "torch" in changed:
        return "torch"
    preferred = _STANDS_ON.get(red.module, ())
    return own or next((name for name in preferred if name in changed), changed[0])


def tell_case(case: Case, sides: Sides) -> Culprit:
    """A case of red modules as a culprit."""
    first, diagnosis = case.first, case.first.diagnosis
    if case.shared is not None:
        cause = diagnosis.cause if diagnosis.component == case.shared and not sides.changed else Cause.ENVIRONMENT
        diagnosis = Diagnosis(cause, case.shared, diagnosis.missing)
    others = case.members if case.shared is not None else case.others
    cascades = tuple(red.module for red in others)
    files = sides.files.get(first.module, ())
    facts = replace(sides.facts, held=first.was_good, files=files, cascades=cascades)
    return Culprit(
        module=first.module if case.shared is None else ENVIRONMENT,
        cause=diagnosis.cause,
        component=diagnosis.component,
        signature=str(first.signature),
        summary=_summary(case, diagnosis, sides),
        evidence=_evidence(first, diagnosis, sides),
        entry_points=_entry_points(case),
        next_step=next_step(first, diagnosis, facts),
        cascades=cascades,
    )


def tell_green(green: Green, sides: Sides) -> Culprit:
    """A module that is good, and became slower by itself, or changed in what no check of it holds."""
    parts = (*green.watched, *map(_tell_slow, green.slow))
    component = _slow_component(green.module, sides)
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


def _tell_slow(slow: Slow) -> Watched:
    # Time on the host has that of the device in it, and is noisier.
    worst = max(slow.changes, key=lambda row: (not row.name.endswith(HOST), row.ratio))
    slowest = f"{worst.ratio:.2f} times the time of `{worst.name}`"
    return Watched(
        slow.module,
        Cause.PERFORMANCE,
        f"slower: {', '.join(sorted({row.name for row in slow.changes}))}",
        f"{slow.module} takes {slowest} (it was {worst.before_ms:.3g} ms and is {worst.after_ms:.3g} ms)",
        tuple(say_timing(row) for row in slow.changes),
        slowest,
    )


def cut(text: str, longest: int) -> str:
    """A text, or as many whole words of it as fit."""
    return text if len(text) <= longest else f"{text[: longest - 1].rsplit(' ', 1)[0]}…"


def say_timing(row: TimingChange) -> str:
    """A timing in a line."""
    bound = f"believed of noise: {row.noise:.3f} ({row.derivation})" if row.noise else row.derivation
    return f"{row.module} {row.name}: {row.before_ms:.4g} -> {row.after_ms:.4g} ms, ratio {row.ratio:.3f}; {bound}"


def _slow_component(module: str, sides: Sides) -> str:
    if not sides.changed:
        return ""
    return next((name for name in _STANDS_ON.get(module, ()) if name in sides.changed), sides.changed[0])


def _summary(case: Case, diagnosis: Diagnosis, sides: Sides) -> str:
    first = case.first
    many = case.shared is not None and len(case.members) > 1
    who = f"{len(case.members)} modules ({first.module} first)" if many else first.module
    below = f" in {diagnosis.component}" if diagnosis.component else ""
    if first.module != first.receipt.probe:
        what = f"{first.module} does not compute as it is asked to, as the probe of {first.receipt.probe} sees it"
    elif first.raised is not None and first.raised.died:
        where = f" in {first.raised.frame}" if first.raised.frame else ""
        what = f"the process of {who} ended with {first.raised.kind}{where}"
    elif first.raised is not None:
        said = cut(_PLACE.sub("", " ".join(first.raised.text.split())), _QUOTED).rstrip(".")
        what = f"{who} {'raise' if many else 'raises'} {first.raised.kind}{below}: {said}"
    elif lost := [entry for check in first.checks if check.kind is CheckKind.ENTRY for entry in check.entries or ()]:
        what = _say_lost_entries(lost, case)
    else:
        failed, of_all = len(first.checks) or "some", len(first.receipt.checks) or "its"
        of_first = f": of {first.module}" if many else ""
        what = f"{who} {'fail' if many else 'fails'}{of_first} {failed} of {of_all} checks{below}"
    end = "" if what.endswith("…") else "."
    return f"{what}{end} {_say_part(case)}{_history(first, sides)}".strip()


def _say_part(case: Case) -> str:
    """What layers share, where that is at fault; empty where it is one module's own."""
    if case.part is not None:
        return (
            f"Every layer that runs {case.part.name} ({case.part.where}) is wrong in the same way: it is at fault, or "
            "what it calls, and no layer by itself. "
        )
    names = [check.name for check in case.first.checks] if case.first.raised is None else []
    if case.first.module == FIREWALL and names and case.others and all(name.startswith("fp8.") for name in names):
        return "The scope itself is as it should be: the rounding or the product that all layers have in FP8 is not. "
    return ""


def _say_lost_entries(lost: Sequence[str], case: Case) -> str:
    """Entry points that are not there, and the modules that take them."""
    names = ", ".join(f"`{name}`" for name in dict.fromkeys(lost))
    takers = [module for module, uses in USES.items() if module != FIREWALL and set(lost) & set(uses)]
    taken = f"; {', '.join(takers)} {'takes' if len(takers) == 1 else 'take'} {'it' if len(set(lost)) == 1 else 'them'}"
    return f"{case.first.module} does not find {names} in Transformer Engine{taken if takers else ''}"


def _history(red: Red, sides: Sides) -> str:
    """What is known of the module before: a failure that was hidden is not new to the release for sure."""
    if red.before is None or red.before.outcome is Outcome.NOT_RUN:
        return f"Nothing was seen of it on {sides.facts.before}: this may not be new."
    if red.before.outcome is Outcome.BLOCKED:
        return f"It was hidden on {sides.facts.before}, where {red.before.blocked_by or 'another cell'} blocked it."
    return "" if red.was_good else f"On {sides.facts.before} it failed in another way."


def _evidence(red: Red, diagnosis: Diagnosis, sides: Sides) -> tuple[str, ...]:
    lines: list[str] = []
    if red.raised is not None:
        lines.append(cut(red.raised.line, _LONGEST))
        if red.raised.frame:
            lines.append(f"innermost frame: {red.raised.frame}")
        if red.raised.bridge and red.raised.bridge[-1] != red.raised.frame:
            lines.append(f"called from {red.raised.bridge[-1]}")
    lines += _say_checks(red)
    lines += [
        f"{row.path}: requested {row.requested}, claimed {row.claimed or 'none'}, "
        f"observed {', '.join(row.observed) or 'nothing'}{f' ({row.reasons[0]})' if row.reasons else ''}"
        for row in red.fallbacks
        if diagnosis.cause is Cause.SILENT_FALLBACK
    ][:_LISTED]
    if diagnosis.component:
        if version := version_of(diagnosis.component, red.receipt):
            lines.append(f"{diagnosis.component} as loaded: {version}")
        lines += [
            f"{copy.name} is there twice: {shorter(copy.kept)} and {', '.join(map(shorter, copy.others))}"
            for copy in second_copies(red.receipt, diagnosis.component)
        ]
    lines += [
        f"{row.name}: {row.before or 'not loaded'} -> {row.after or 'not loaded'}" for row in sides.facts.versions
    ]
    return tuple(dict.fromkeys(lines))


def _say_checks(red: Red) -> list[str]:
    checks = [check for check in red.receipt.checks if not check.passed]
    lines = [f"check {_say_check(check)}" for check in checks[:_LISTED]]
    return [*lines, f"and {len(checks) - _LISTED} checks more"] if len(checks) > _LISTED else lines


def _say_check(check: Check) -> str:
    parts = (part for part in check.parts if not part.passed)
    found = [
        f"{part.name} {part.observed if part.observed is not None else 'nothing':.4g} against {part.bound:.4g}"
        if part.observed is not None and part.bound is not None
        else f"{part.name} could not be judged"
        for part in parts
    ]
    said = "; ".join(found[:2]) or " ".join(check.detail.split())[:200] or "failed"
    return f"{check.name}: {said}"


def _entry_points(case: Case) -> tuple[str, ...]:
    """Accessors of the bridge that the failure is about: named by it, else all that its module uses."""
    red = case.first
    if named := case.part.shows if case.part is not None else red.entries:
        order = (*USES.get(red.module, ()), *(name for names in USES.values() for name in names))
        return tuple(dict.fromkeys(name for name in order if name in named))
    said = entries_in(red.raised.text) if red.raised else ()
    return said or (() if red.module == FIREWALL else USES.get(red.module, ()))
