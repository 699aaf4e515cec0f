"""Blame: the first red module in dependency order whose failure no other failure explains.

A red module is filed under an earlier one if both show the same failure (same signature, or same cause at the same
entry points), or if every failed check of the later module can follow from a failed check of the earlier one. A
component below Transformer Engine that fails in several independent modules is blamed on the environment.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import cached_property
from itertools import combinations
from typing import Final, TypeGuard

from ..catalog.bridge import BridgeModule
from ..evidence.receipt import Backend, Outcome, Receipt
from ..evidence.values import ENVIRONMENT, Cause
from .checks import (
    BLOCK,
    FIREWALL,
    SHARED_PARTS,
    USES,
    CheckKind,
    FailedCheck,
    Precision,
    SharedPart,
    entries_in,
    read_failed_checks,
)
from .diagnose import Diagnosis, Raised, Signature, diagnose, read_raised, sign
from .rows import OF_THE_HOST

WITNESSED: Final = "linear_walker"  # the firewall's probe observes the low-precision scope through a linear layer
_DISTINCT: Final = 12  # characters: two different failures hardly share a text this long
_MANY: Final = 3  # this many processes killed from outside have one cause
_CALL: Final = re.compile(r"^TypeError: .*(?:unexpected keyword argument|missing \d+ required|takes .* arguments?\b)")
_SHAPES: Final = re.compile(
    r"\bshapes?\b|\bsizes?\b|\bdimension|split_sizes|out of bounds|broadcast|\bdtype|WeightMismatch|contiguous|stride|"
    r"divisible|multiples?\b|\balign",
    re.IGNORECASE,
)
_RESULT: Final = re.compile(r"^(?:AttributeError|TypeError|ValueError): .*(?:'\w+' object (?:has no|is not)|to unpack)")
_OF_THE_LAYER: Final = re.compile(
    r"(?:fp8\.\w+\.(?:forward|dgrad|wgrad|bias|finite|blocks|backend)(?:\.applied)?|second-use)$"
)


class Change(StrEnum):
    """Change of one cell between two stacks; defined for every pair of outcomes, missing ones included."""

    REGRESSED = "regressed"  # good before, bad now
    FIXED = "fixed"  # bad before, good now
    SAME_FAILURE = "same-failure"  # bad before and now, with the same signature
    NEW = "new"  # no result before, or another failure; good or bad now
    LOST = "lost"  # no evidence now: missing, not-run, or blocked by another failure
    UNCHANGED = "unchanged"  # good before and now, or no evidence on either side


class Link(IntEnum):
    """How strongly one failure explains another."""

    NONE = 0
    CHECKS = 1  # the failed checks can follow from the cause
    SAME = 2  # the same failure


@dataclass(frozen=True)
class Red:
    """A red module.

    Attributes:
        before: receipt of the first stack; None for none.
        change: between the two stacks.
    """

    module: str
    receipt: Receipt
    change: Change = Change.NEW
    before: Receipt | None = None

    @cached_property
    def signature(self) -> Signature:
        """Signature of the failure."""
        return sign(self.receipt) or Signature(self.receipt.outcome.value)

    @cached_property
    def raised(self) -> Raised | None:
        """The exception; None where only checks failed."""
        return None if self.receipt.outcome is Outcome.FAIL else read_raised(self.receipt)

    @cached_property
    def checks(self) -> tuple[FailedCheck, ...]:
        """Failed checks, also of a probe that raised later."""
        return read_failed_checks(self.receipt)

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """The cause of this failure alone."""
        return diagnose(self.receipt)

    @property
    def uses(self) -> frozenset[str] | None:
        """Accessors that the module uses; None for a composition."""
        return frozenset(USES[self.module]) if self.module in USES else None

    @cached_property
    def entries(self) -> frozenset[str] | None:
        """Accessors of the entry points at fault; None where unknown.

        Of an exception: the accessors that its text names, else those of its innermost frame in Transformer Engine.
        """
        if self.raised is None:
            known = [check.entries for check in self.checks]
            return frozenset[str]().union(*filter(None, known)) if known and all(known) else None
        found = entries_in(self.raised.text) or entries_in(self.raised.frame)
        return frozenset(found) if found else None

    @property
    def reach(self) -> frozenset[str] | None:
        """Accessors that can be at fault."""
        return self.entries if self.entries is not None else self.uses

    @property
    def fallbacks(self) -> tuple[Backend, ...]:
        """Paths that ran another backend than requested."""
        return tuple(row for row in self.receipt.backends if row.requested not in (row.claimed, *row.observed))

    @property
    def fits_no_call(self) -> bool:
        """Whether an entry point refuses its arguments, which depends on its own code alone."""
        return self.raised is not None and bool(_CALL.search(self.raised.line) and entries_in(self.raised.text))

    @property
    def is_blocked(self) -> bool:
        """Whether another cell blocks this one."""
        return self.receipt.outcome is Outcome.BLOCKED

    @property
    def was_good(self) -> bool:
        """Whether the cell passed in the first stack."""
        return self.before is not None and self.before.outcome.is_good

    @property
    def is_old(self) -> bool:
        """Whether the cell failed in the same way in the first stack."""
        return self.change is Change.SAME_FAILURE

    def has(self, *kinds: CheckKind) -> bool:
        """Whether a check of one of these kinds failed."""
        return any(check.kind in kinds for check in self.checks)

    def met(self, component: str) -> bool:
        """Whether the module itself ran into a component below Transformer Engine."""
        found = self.diagnosis
        below = found.cause in (Cause.ENVIRONMENT, Cause.BINARY)
        return not self.is_blocked and found.component == component and below


# --- which failure explains which -------------------------------------------------------------------------------------


def explains(cause: Red, effect: Red) -> Link:
    """How strongly the failure of `cause` explains the failure of `effect`, which depends on `cause`."""
    if effect.is_blocked:
        by = effect.receipt.blocked_by
        return Link.SAME if by and by in (cause.receipt.cell, cause.receipt.blocked_by) else Link.NONE
    if (cause.is_old and effect.was_good) or (effect.is_old and not cause.is_old):
        return Link.NONE  # a failure of one stack alone has another cause
    if effect.raised is None:
        return Link.CHECKS if _explains_checks(cause, effect) else Link.NONE
    mine, theirs = cause.diagnosis, effect.diagnosis
    alike = cause.raised is not None and (mine.cause, mine.component) == (theirs.cause, theirs.component)
    return Link.SAME if alike and _meet(cause.entries, effect.entries) else _explains_exception(cause, effect)


def is_one_failure(one: Red, other: Red) -> bool:
    """Whether two failures have the same signature; signatures of failed checks are not specific enough."""
    mine, theirs = one.signature, other.signature
    return mine == theirs and not mine.checks


def _explains_exception(cause: Red, effect: Red) -> Link:
    """For an effect that raised: whether a wrong value from the cause can explain the exception."""
    raised = effect.raised
    assert raised is not None
    if raised.kind == effect.receipt.outcome.value:  # no text that distinguishes the failure
        return Link.CHECKS
    handed = cause.has(CheckKind.NUMBERS, CheckKind.CONTRACT) and bool(_SHAPES.search(raised.line))
    # A result of another type fails at whatever its caller does with it first (a pair in place of a tensor, TE 2.20.2).
    handed |= cause.raised is not None and all(_RESULT.search(one.line) for one in (cause.raised, raised))
    named = cause.entries is not None and effect.entries is not None
    # The frame that refuses a wrong shape does not show which layer made it.
    about = effect.uses if handed and not entries_in(raised.text, effect.uses) else effect.reach
    return Link.CHECKS if (named or handed) and _meet(cause.reach, about) else Link.NONE


def _explains_checks(cause: Red, effect: Red) -> bool:
    """Whether every failed check of the effect can follow from the cause."""
    if not cause.receipt.checks and not effect.receipt.checks:
        return cause.receipt.outcome is Outcome.FAIL or cause.receipt.failure is None  # no details on either side
    return bool(effect.checks) and all(_explains_check(cause, effect, check) for check in effect.checks)


def _explains_check(cause: Red, effect: Red, check: FailedCheck) -> bool:
    # In the block every layer contributes to the gradient of each layer.
    whole = check.entries is None or (effect.module == BLOCK and check.kind is CheckKind.NUMBERS)
    about = effect.uses if whole else check.entries
    if cause.module == FIREWALL:  # every layer runs in its scope
        return any(
            _meet(one.entries, about) if one.kind is CheckKind.ENTRY else _is_reached(one, check)
            for one in cause.checks
        )
    if not _meet(cause.reach, about):
        return False
    if cause.raised is not None and check.kind in (CheckKind.BACKEND, CheckKind.RAISED, CheckKind.CONTRACT):
        return True  # a backend that raises is skipped
    return any(_leads_to(one, check) for one in cause.checks)


def _leads_to(one: FailedCheck, check: FailedCheck) -> bool:
    """Whether one failed check can cause another."""
    if check.kind in (CheckKind.BACKEND, CheckKind.CONTRACT, CheckKind.ENTRY):
        return one.kind in (CheckKind.BACKEND, CheckKind.CONTRACT, CheckKind.RAISED) and _is_reached(one, check)
    # A broken contract makes numbers wrong in any precision; a wrong forward pass makes gradients wrong.
    return one.kind is CheckKind.CONTRACT or (_is_reached(one, check) and (not one.backward or check.backward is True))


def _is_reached(one: FailedCheck, check: FailedCheck) -> bool:
    """A fault in one precision also shows in lower ones, which use it, or have looser bounds."""
    return Precision.ANY in (one.precision, check.precision) or one.precision.level <= check.precision.level


def _meet(one: frozenset[str] | None, other: frozenset[str] | None) -> bool:
    """Whether two failures can share an entry point; None stands for any entry point."""
    return one is None or other is None or bool(one & other)


# --- modules in dependency order --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """Modules in dependency order with direct and indirect dependencies; compositions depend on all modules."""

    names: tuple[str, ...]
    below: Mapping[str, frozenset[str]] = field(repr=False)

    def rank(self, name: str) -> tuple[int, str]:
        """Sort key."""
        return (self.names.index(name), name) if name in self.names else (len(self.names), name)

    def sort(self, reds: Iterable[Red]) -> tuple[Red, ...]:
        """Red modules in this order."""
        return tuple(sorted(reds, key=lambda red: self.rank(red.module)))

    def depends(self, name: str, other: str) -> bool:
        """Whether a fault of `other` can reach `name`."""
        return other in self.below[name] if name in self.below else other in self.names


def read_order(modules: Sequence[BridgeModule]) -> Order:
    """The order of the matrix; of a dependency that comes later in the matrix only the name counts."""
    below: dict[str, frozenset[str]] = {}
    for module in modules:
        names = set(module.depends_on).union(*(below.get(other, ()) for other in module.depends_on))
        below[module.id] = frozenset(names - {module.id})
    return Order(tuple(module.id for module in modules), below)


def has_evidence(receipt: Receipt | None) -> bool:
    """Whether there is a receipt other than `not-run`."""
    return receipt is not None and receipt.outcome is not Outcome.NOT_RUN


def is_red(receipt: Receipt | None) -> TypeGuard[Receipt]:
    """Whether a receipt is bad, timeouts and blocked cells included."""
    return receipt is not None and has_evidence(receipt) and not receipt.outcome.is_good


def find_blockers(receipts: Mapping[str, Receipt], hosts: Collection[str]) -> dict[str, Receipt | None]:
    """Blocked module -> the red receipt at the end of its chain of blockers; None for none.

    Args:
        receipts: by module.
        hosts: modules with a fault of the host, which does not count as red.
    """
    by_cell = {one.cell: one for name, one in receipts.items() if name not in hosts or one.outcome is Outcome.BLOCKED}
    found: dict[str, Receipt | None] = {}
    for name, receipt in receipts.items():
        if receipt.outcome is Outcome.BLOCKED:
            behind: Receipt | None = receipt
            for _ in by_cell:  # ends cycles
                if behind is not None and behind.outcome is Outcome.BLOCKED:
                    behind = by_cell.get(behind.blocked_by)
            found[name] = behind if is_red(behind) and behind.outcome is not Outcome.BLOCKED else None
    return found


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One cause.

    Attributes:
        first: the culprit; of what many share, the first in dependency order.
        others: cascades, in dependency order.
        shared: the component that failed in several independent modules; "" for many processes that were killed for an
            unknown reason; None for a case of one module.
        part: part of Transformer Engine that is wrong in the layers of several modules; None for one module.
    """

    first: Red
    others: tuple[Red, ...] = ()
    shared: str | None = None
    part: SharedPart | None = None

    @property
    def members(self) -> tuple[Red, ...]:
        """The culprit and its cascades."""
        return (self.first, *self.others)

    @property
    def name(self) -> str:
        """What is blamed: the first module, or the environment."""
        return self.first.module if self.shared is None else ENVIRONMENT

    @property
    def filed(self) -> tuple[Red, ...]:
        """Modules that are filed under that name."""
        return self.others if self.shared is None else self.members


def blame(receipts: Iterable[Receipt], modules: Sequence[BridgeModule]) -> tuple[Case, ...]:
    """Every red module of one environment as a culprit or a cascade, without a comparison; the first case is to blame.

    Args:
        receipts: in any order; of several receipts of a probe a red one counts.
        modules: in dependency order.
    """
    found, order = {one.probe: one for one in sorted(receipts, key=is_red)}, read_order(modules)
    reds = [Red(probe, receipt) for probe, receipt in found.items() if is_red(receipt)]
    return file_reds(reds, found, order)


def file_reds(reds: Iterable[Red], seen: Mapping[str, Receipt], order: Order) -> tuple[Case, ...]:
    """Cases with every red module, in dependency order of their culprits.

    Args:
        reds: one for each module.
        seen: receipts of all modules: a part that a good module also uses is not at fault.
    """
    ranked = list(order.sort(reds))
    witness = next((red for red in ranked if red.module == FIREWALL), None)
    layer = next((red for red in ranked if red.module == WITNESSED), None)
    if witness is None or not _looks_through(witness, layer, seen):
        witness = None
    elif layer is None:  # the layer passes its own probe; only the firewall sees that it leaves the scope
        ranked.insert(0, replace(witness, module=WITNESSED))
    if witness is not None:
        ranked.remove(witness)
        ranked.sort(key=lambda red: red.module != WITNESSED)
    roots: dict[str, Red] = {}  # module -> its culprit
    for index, effect in enumerate(ranked):
        roots[effect.module] = _root_of(effect, ranked[:index], roots, order)
    if witness is not None:
        ranked.append(witness)
        roots[FIREWALL] = roots[WITNESSED]
    cases = (
        Case(root, order.sort(red for red in ranked if roots[red.module] is root and red is not root))
        for root in ranked
        if roots[root.module] is root
    )
    return tuple(sorted(cases, key=lambda case: order.rank(case.first.module)))


def _root_of(effect: Red, earlier: Sequence[Red], roots: dict[str, Red], order: Order) -> Red:
    """The culprit of a module; the module itself where no other failure explains it."""
    found: list[tuple[Link, Red]] = []
    for cause in earlier:
        link = explains(cause, effect)
        if not order.depends(effect.module, cause.module):  # independent modules: only the same specific failure counts
            told_apart = len(cause.signature.text) >= _DISTINCT or bool(cause.signature.frame)
            same = told_apart and is_one_failure(cause, effect)
            blocked = effect.is_blocked and effect.receipt.blocked_by == cause.receipt.cell
            link = Link.SAME if same or blocked else Link.NONE
        if link:
            found.append((link, cause))
    if not found:
        return effect
    strongest = max(link for link, _ in found)
    causes = [cause for link, cause in found if link == strongest]
    cause = next((cause for cause in causes if roots[cause.module] is cause), causes[0])
    if strongest is Link.CHECKS and cause.raised is None:
        # The culprit above cannot cause this failure, so the cause has its own fault too.
        roots[cause.module] = cause
    return roots[cause.module]


def _looks_through(witness: Red, layer: Red | None, seen: Mapping[str, Receipt]) -> bool:
    """Whether the firewall is red only because of the linear layer through which its probe observes the scope.

    The scope is correct where another module passes in it, or where the layer itself raised the exception.
    """
    others_hold = any(name in seen and seen[name].outcome.is_good for name in ("expert_gemm", "layer_spec"))
    if layer is None:
        applied = [check for check in witness.checks if check.name.endswith(".applied")]
        of_scope = any(check.entries or check.name.startswith(("scope.", "support.")) for check in witness.checks)
        holds = WITNESSED in seen and seen[WITNESSED].outcome.is_good and others_hold
        return holds and bool(applied) and not of_scope and all(one.kind is CheckKind.BACKEND for one in applied)
    if witness.raised is not None:
        trace = witness.raised.traceback
        same = others_hold and "probes/fp8_linear.py" in trace and is_one_failure(witness, layer)
        return same or "in is_judged" in trace
    of_layer = bool(witness.checks) and all(_OF_THE_LAYER.match(check.name) for check in witness.checks)
    return of_layer and others_hold and layer.has(CheckKind.NUMBERS, CheckKind.BACKEND)


def share_cases(cases: Sequence[Case], order: Order) -> tuple[Case, ...]:
    """Merge cases with a cause below their own layers.

    Such a cause is a part of Transformer Engine that is wrong in every layer that runs it, a component that failed in
    independent modules, or the killing of many processes. Resources of the host never belong to a module.
    """
    left: list[Case] = []
    groups: dict[str, list[Case]] = {}
    for case in _share_parts(cases, order):
        first, component = case.first, case.first.diagnosis.component
        killed = not component and first.raised is not None and first.raised.died
        if not first.is_old and first.met(component) and (component or killed):
            groups.setdefault(component, []).append(case)
        else:
            left.append(case)
    for component, mine in groups.items():
        met = {red.module for case in mine for red in case.members if red.met(component)}
        single = met.intersection(order.names) or met  # a composition runs all modules: it is no witness beside one
        apart = any(not (order.depends(a, b) or order.depends(b, a)) for a, b in combinations(single, 2))
        shared = component in OF_THE_HOST or apart if component else len(mine) >= _MANY
        left += [merge_cases(mine, component, order)] if shared else mine
    return tuple(sorted(left, key=lambda case: order.rank(case.first.module)))


def merge_cases(cases: Sequence[Case], component: str, order: Order) -> Case:
    """Several cases merged into one of a component below Transformer Engine."""
    members = order.sort(red for case in cases for red in case.members)
    return Case(members[0], members[1:], component)


def _share_parts(cases: Sequence[Case], order: Order) -> list[Case]:
    """Merge cases of wrong numbers in one shared part into a case of the first module."""
    left = list(cases)
    for part in SHARED_PARTS:
        groups: dict[bool, list[Case]] = {}
        for case in left:
            if _is_by(part, case.first):
                groups.setdefault(case.first.is_old, []).append(case)
        for mine in groups.values():
            members = order.sort(red for case in mine for red in case.members)
            # Outside of the block, a check of one layer shows that this layer alone is wrong.
            about = (check.entries or red.uses for red in members if red.module != BLOCK for check in red.checks)
            wrong = frozenset[str]().union(*(names for names in about if names and len(names) == 1))
            if len(mine) > 1 and part.shows <= wrong:
                first = order.sort(case.first for case in mine)[0]
                left = [case for case in left if case not in mine]
                left.append(Case(first, tuple(red for red in members if red is not first), part=part))
    return left


def _is_by(part: SharedPart, red: Red) -> bool:
    """Whether only numbers are wrong, and every wrong number can come from layers that run this part."""
    if red.receipt.outcome is not Outcome.FAIL or red.diagnosis.component or red.diagnosis.cause is not Cause.NUMERICS:
        return False
    # In the block every layer passes wrong values on, so the gradient that is wrong does not locate the fault.
    about = (red.uses if check.entries is None or red.module == BLOCK else check.entries for check in red.checks)
    return all(one is None or (part.shows | part.may_show) & one for one in about)
