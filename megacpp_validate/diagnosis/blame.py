"""Who is to blame for red modules: the first one in dependency order whose failure no other one explains.

Two rules file a red module under another one: both show one failure (the same signature, or one class of cause over
the same entry points), or every check that failed in the later one is reached from a check that failed in the earlier
one. What several modules that do not depend on one another meet below Transformer Engine (one component, each by
itself) is blamed on the environment.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Final, Protocol, TypeGuard

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

WITNESSED: Final = "linear_walker"  # the firewall's probe looks at the low-precision scope through a linear layer
_DISTINCT: Final = 12  # characters of a text that two failures do not share by chance
_MANY: Final = 3  # so many processes that were killed from outside have one cause
_SHAPES: Final = re.compile(
    r"\bshapes?\b|\bsizes?\b|\bdimension|split_sizes|out of bounds|broadcast|\bdtype|WeightMismatch|contiguous|stride|"
    r"divisible|multiples?\b|\balign",
    re.IGNORECASE,
)
_CALL: Final = re.compile(r"^TypeError: .*(?:unexpected keyword argument|missing \d+ required|takes .* arguments?\b)")
_OF_THE_LAYER: Final = re.compile(
    r"(?:fp8\.\w+\.(?:forward|dgrad|wgrad|bias|finite|blocks|backend)(?:\.applied)?|second-use)$"
)


class Module(Protocol):
    """A row of bridge modules: `catalog.bridge.BridgeModule`, whose room lies above this one."""

    @property
    def id(self) -> str:
        """The module."""

    @property
    def depends_on(self) -> Sequence[str]:
        """Modules that it uses."""

    @property
    def files(self) -> Sequence[str]:
        """Its files in the bridge."""


class Change(StrEnum):
    """What became of one cell between two stacks. Total: every pair of outcomes, and of none, has one."""

    REGRESSED = "regressed"  # good before, bad now
    FIXED = "fixed"  # bad before, good now
    SAME_FAILURE = "same-failure"  # bad before and now, by one signature
    NEW = "new"  # nothing was seen before, or another failure; what is seen now may be good or bad
    LOST = "lost"  # no evidence now: missing, not-run, or blocked by a cell whose failure is not this one's
    UNCHANGED = "unchanged"  # good before and now, or no evidence on either side


class Link(IntEnum):
    """How strongly a failure explains another; 0 is not at all."""

    NONE = 0
    CHECKS = 1  # the checks that failed are reached from the cause
    SAME = 2  # one failure, seen twice


@dataclass(frozen=True)
class Red:
    """A red module.

    Attributes:
        before: its receipt on the other side; None where there is none.
        change: what became of it.
    """

    module: str
    receipt: Receipt
    change: Change = Change.NEW
    before: Receipt | None = None

    @cached_property
    def signature(self) -> Signature:
        """Of its failure."""
        return sign(self.receipt) or Signature(self.receipt.outcome.value)

    @cached_property
    def raised(self) -> Raised | None:
        """What was raised; None where only checks failed."""
        return None if self.receipt.outcome is Outcome.FAIL else read_raised(self.receipt)

    @cached_property
    def checks(self) -> tuple[FailedCheck, ...]:
        """Those that failed; also of a probe that raised after them."""
        return read_failed_checks(self.receipt)

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """The class of cause of it alone."""
        return diagnose(self.receipt)

    @property
    def uses(self) -> frozenset[str] | None:
        """Accessors of all that the module uses; None for a composition."""
        return frozenset(USES[self.module]) if self.module in USES else None

    @cached_property
    def entries(self) -> frozenset[str] | None:
        """Accessors of the entry points that its failure is about; None where it can be any.

        Of what was raised: those that its text names, else those of its innermost frame of Transformer Engine.
        """
        if self.raised is None:
            known = [check.entries for check in self.checks]
            return frozenset[str]().union(*filter(None, known)) if known and all(known) else None
        texts = self.raised.text, self.raised.frame
        # What is not its module's own: the layer that a probe looks through, a recipe that a layer takes.
        found = (*(entries_in(text, self.uses) for text in texts), *(entries_in(text) for text in texts))
        return next((frozenset(names) for names in found if names), None)

    @property
    def reach(self) -> frozenset[str] | None:
        """Accessors that its failure can be about."""
        return self.entries if self.entries is not None else self.uses

    @property
    def fallbacks(self) -> tuple[Backend, ...]:
        """Paths that took another backend than was requested."""
        return tuple(row for row in self.receipt.backends if row.requested not in (row.claimed, *row.observed))

    @property
    def fits_no_call(self) -> bool:
        """Whether an entry point does not take what it is called with: its own code alone decides that."""
        return self.raised is not None and bool(_CALL.search(self.raised.line) and entries_in(self.raised.text))

    @property
    def is_blocked(self) -> bool:
        """Whether another cell stands in its way."""
        return self.receipt.outcome is Outcome.BLOCKED

    @property
    def was_good(self) -> bool:
        """Whether it held before."""
        return self.before is not None and self.before.outcome.is_good

    @property
    def is_old(self) -> bool:
        """Whether it failed in the same way before."""
        return self.change is Change.SAME_FAILURE

    def has(self, *kinds: CheckKind) -> bool:
        """Whether a check of one of these kinds failed."""
        return any(check.kind in kinds for check in self.checks)

    def met(self, component: str) -> bool:
        """Whether it met a component below Transformer Engine itself, instead of being kept from running."""
        found = self.diagnosis
        below = found.cause in (Cause.ENVIRONMENT, Cause.BINARY)
        return not self.is_blocked and found.component == component and below


# --- which failure explains which -------------------------------------------------------------------------------------


def explains(cause: Red, effect: Red) -> Link:
    """How the failure of `cause` explains that of `effect`, which depends on it."""
    if effect.is_blocked:
        by = effect.receipt.blocked_by
        blocked = by == cause.receipt.cell if by else False
        return Link.SAME if blocked or (cause.is_blocked and by == cause.receipt.blocked_by) else Link.NONE
    if (cause.is_old and effect.was_good) or (effect.is_old and not cause.is_old):
        return Link.NONE  # what was there on one side alone has a cause of its own
    if is_one_failure(cause, effect) or (cause.receipt.outcome is Outcome.IMPORT_ERROR and not effect.receipt.checks):
        return Link.SAME
    if effect.raised is None:
        return Link.CHECKS if _explains_checks(cause, effect) else Link.NONE
    mine, theirs = cause.diagnosis, effect.diagnosis
    alike = cause.raised is not None and (mine.cause, mine.component) == (theirs.cause, theirs.component)
    return Link.SAME if alike and _meet(cause.entries, effect.entries) else _explains_exception(cause, effect)


def is_one_failure(one: Red, other: Red) -> bool:
    """Whether two failures are one by their signature; failed checks alone do not tell two faults apart."""
    mine, theirs = one.signature, other.signature
    return mine == theirs and not mine.checks


def _explains_exception(cause: Red, effect: Red) -> Link:
    """The effect raised: what a check of the cause saw raised, or because of what the cause handed on."""
    raised = effect.raised
    assert raised is not None
    lost = (check for check in cause.checks if check.kind is CheckKind.ENTRY and check.entries and effect.entries)
    if any(check.raised and check.raised[:200] in raised.line for check in cause.checks):
        return Link.SAME
    if any(check.entries & effect.entries for check in lost):  # type: ignore[operator]
        return Link.SAME
    if cause.raised is not None and not cause.checks:
        return Link.NONE
    if raised.kind == effect.receipt.outcome.value:  # nothing that would tell it apart
        return Link.CHECKS
    handed = cause.has(CheckKind.NUMBERS, CheckKind.CONTRACT) and bool(_SHAPES.search(raised.line))
    named = cause.entries is not None and effect.entries is not None
    # A wrong shape is refused where it is taken: that frame tells nothing of who made it.
    about = effect.uses if handed and not entries_in(raised.text, effect.uses) else effect.reach
    return Link.CHECKS if (named or handed) and _meet(cause.reach, about) else Link.NONE


def _explains_checks(cause: Red, effect: Red) -> bool:
    """Whether every check that failed in the effect can come from the cause."""
    if not cause.receipt.checks and not effect.receipt.checks:
        return cause.receipt.outcome is Outcome.FAIL or cause.receipt.failure is None  # neither says anything
    checks = [check for check in effect.checks if check.name != "second-use"] or list(effect.checks)
    return bool(checks) and all(_explains_check(cause, effect, check) for check in checks)


def _explains_check(cause: Red, effect: Red, check: FailedCheck) -> bool:
    if cause.raised is not None and check.raised and cause.raised.text[:200] in check.raised:
        return True
    # In the block a gradient is one layer's, and made by all.
    whole = check.entries is None or (effect.module == BLOCK and check.kind is CheckKind.NUMBERS)
    about = effect.uses if whole else check.entries
    if cause.module == FIREWALL:  # its scope is around every layer
        return any(
            _meet(one.entries, about) if one.kind is CheckKind.ENTRY else one.of_scope and _is_reached(one, check)
            for one in cause.checks
        )
    if not _meet(cause.reach, about):
        return False
    if cause.raised is not None and check.kind in (CheckKind.BACKEND, CheckKind.RAISED, CheckKind.CONTRACT):
        return True  # what raises is passed over
    return any(_leads_to(one, check) for one in cause.checks)


def _leads_to(one: FailedCheck, check: FailedCheck) -> bool:
    """Whether a failed check can lead to another one, by what they say."""
    if check.kind in (CheckKind.BACKEND, CheckKind.CONTRACT, CheckKind.ENTRY):
        return one.kind in (CheckKind.BACKEND, CheckKind.CONTRACT, CheckKind.RAISED) and _is_reached(one, check)
    if check.kind is CheckKind.RAISED:
        return one.kind is CheckKind.RAISED or one.shape
    # What should be refused or native, and is computed, is wrong in any precision; gradients follow the forward pass.
    return one.kind is CheckKind.CONTRACT or (_is_reached(one, check) and (not one.backward or check.backward is True))


def _is_reached(one: FailedCheck, check: FailedCheck) -> bool:
    """A fault in some precision shows in those below it, which compute in it, too, or are bounded less tightly."""
    return Precision.ANY in (one.precision, check.precision) or one.precision.level <= check.precision.level


def _meet(one: frozenset[str] | None, other: frozenset[str] | None) -> bool:
    """Whether two failures can be about one entry point; one that names none can be about any."""
    return one is None or other is None or bool(one & other)


# --- modules in dependency order --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """Modules in dependency order, and what each stands on, directly or not; compositions stand on all modules."""

    names: tuple[str, ...]
    below: Mapping[str, frozenset[str]] = field(repr=False)

    def rank(self, name: str) -> tuple[int, str]:
        """To sort by."""
        return (self.names.index(name), name) if name in self.names else (len(self.names), name)

    def sort(self, reds: Iterable[Red]) -> tuple[Red, ...]:
        """Red modules in this order."""
        return tuple(sorted(reds, key=lambda red: self.rank(red.module)))

    def depends(self, name: str, other: str) -> bool:
        """Whether a fault of `other` can reach `name`."""
        return other in self.below[name] if name in self.below else other in self.names

    def is_apart(self, one: str, other: str) -> bool:
        """Whether neither stands on the other."""
        return one != other and not self.depends(one, other) and not self.depends(other, one)


def read_order(modules: Sequence[Module]) -> Order:
    """The order of the matrix; of what a module names that comes after it, only the name counts."""
    below: dict[str, frozenset[str]] = {}
    for module in modules:
        names = set(module.depends_on).union(*(below.get(other, ()) for other in module.depends_on))
        below[module.id] = frozenset(names - {module.id})
    return Order(tuple(module.id for module in modules), below)


def has_evidence(receipt: Receipt | None) -> bool:
    """Whether a receipt says anything about its cell: a missing receipt and `not-run` do not."""
    return receipt is not None and receipt.outcome is not Outcome.NOT_RUN


def is_red(receipt: Receipt | None) -> TypeGuard[Receipt]:
    """Whether a receipt says that its cell does not hold; a time limit and a blocked cell included."""
    return receipt is not None and has_evidence(receipt) and not receipt.outcome.is_good


def find_blockers(receipts: Mapping[str, Receipt], hosts: Collection[str]) -> dict[str, Receipt | None]:
    """Blocked module -> the red receipt that blocks it in the end; None where none does.

    Args:
        receipts: by module.
        hosts: modules that met a fault of the host, which is not red.
    """
    by_cell = {one.cell: one for name, one in receipts.items() if name not in hosts or one.outcome is Outcome.BLOCKED}
    found: dict[str, Receipt | None] = {}
    for name, receipt in receipts.items():
        if receipt.outcome is Outcome.BLOCKED:
            behind: Receipt | None = receipt
            for _ in by_cell:  # a circle ends here
                if behind is not None and behind.outcome is Outcome.BLOCKED:
                    behind = by_cell.get(behind.blocked_by)
            found[name] = behind if is_red(behind) and behind.outcome is not Outcome.BLOCKED else None
    return found


def worst_of(receipts: Iterable[Receipt]) -> dict[str, Receipt]:
    """One receipt a probe: of several the red one; of several red ones always the same, whatever their order."""

    def badness(one: Receipt) -> tuple[bool, bool, bool, str]:
        return is_red(one), one.outcome.is_good, one.failure is not None, repr(one)

    found: dict[str, Receipt] = {}
    for receipt in receipts:
        other = found.get(receipt.probe)
        if other is None or badness(receipt) > badness(other):
            found[receipt.probe] = receipt
    return found


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blame:
    """Every red module, filed.

    Attributes:
        culprits: red, and no other red one explains it; in dependency order, so the first one is to blame.
        cascades: (module, culprit that it is filed under), in dependency order.
    """

    culprits: tuple[str, ...] = ()
    cascades: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Case:
    """One cause.

    Attributes:
        first: the culprit; of what many share, the first in dependency order.
        others: what is filed under it, in dependency order.
        shared: the component that several modules met, each by itself; "" where many were killed and nothing says by
            what; None for a case of one module.
        part: of Transformer Engine, that layers of several modules run and is wrong in all; None for one module.
    """

    first: Red
    others: tuple[Red, ...] = ()
    shared: str | None = None
    part: SharedPart | None = None

    @property
    def members(self) -> tuple[Red, ...]:
        """All of it."""
        return (self.first, *self.others)

    @property
    def name(self) -> str:
        """Who is blamed: the first module, or the environment."""
        return self.first.module if self.shared is None else ENVIRONMENT

    @property
    def filed(self) -> tuple[Red, ...]:
        """What is filed under that name."""
        return self.others if self.shared is None else self.members


def blame(receipts: Iterable[Receipt], modules: Sequence[Module]) -> Blame:
    """File the red receipts of one environment, with nothing to compare them with.

    Args:
        receipts: in any order; several of one probe are one that is red if any is.
        modules: in dependency order.
    """
    found, order = worst_of(receipts), read_order(modules)
    reds = [Red(probe, receipt) for probe, receipt in found.items() if is_red(receipt)]
    cases = file_reds(reds, found, order)
    rows = [(red.module, case.first.module) for case in cases for red in case.others]
    return Blame(tuple(case.first.module for case in cases), tuple(sorted(rows, key=lambda row: order.rank(row[0]))))


def file_reds(reds: Iterable[Red], seen: Mapping[str, Receipt], order: Order) -> tuple[Case, ...]:
    """Every red module in one case, in dependency order of the first ones.

    Args:
        reds: one a module.
        seen: receipts of all modules: what a red one shares with one that holds is well.
    """
    ranked = list(order.sort(reds))
    witness = next((red for red in ranked if red.module == FIREWALL), None)
    layer = next((red for red in ranked if red.module == WITNESSED), None)
    if witness is None or not _looks_through(witness, layer, seen):
        witness = None
    elif layer is None:  # the layer by itself holds, and leaves the scope: the firewall alone sees that
        ranked.insert(0, replace(witness, module=WITNESSED))
    if witness is not None:
        ranked.remove(witness)
        ranked.sort(key=lambda red: red.module != WITNESSED)
    roots: dict[str, Red] = {}  # module -> the culprit that it is filed under
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
    """The culprit that a module is filed under; itself where no other explains it."""
    found: list[tuple[Link, Red]] = []
    for cause in earlier:
        # A culprit that failed in the same way while a module held explains nothing that this module met itself.
        if roots[cause.module].is_old and effect.was_good and not effect.is_blocked:
            continue
        link = explains(cause, effect)
        if not order.depends(effect.module, cause.module):  # apart: only one failure that says enough counts
            alone = effect.is_blocked or len(cause.signature.text) >= _DISTINCT or bool(cause.signature.frame)
            direct = effect.is_blocked and effect.receipt.blocked_by != cause.receipt.cell
            link = link if alone and not direct and (effect.is_blocked or is_one_failure(cause, effect)) else Link.NONE
        if link:
            found.append((link, cause))
    if not found:
        return effect
    strongest = max(link for link, _ in found)
    causes = [cause for link, cause in found if link == strongest]
    cause = next((cause for cause in causes if roots[cause.module] is cause), causes[0])
    if strongest is Link.CHECKS and cause.raised is None:
        # What the culprit above it cannot lead to shows that the cause has a fault of its own, too.
        roots[cause.module] = cause
    return roots[cause.module]


def _looks_through(witness: Red, layer: Red | None, seen: Mapping[str, Receipt]) -> bool:
    """Whether the firewall is red for the layer alone that its probe looks at the scope through.

    The scope is well where another module that is run in it holds, or where the exception is the layer's own.
    """
    others_hold = any(name in seen and seen[name].outcome.is_good for name in ("expert_gemm", "layer_spec"))
    if layer is None:
        applied = [check for check in witness.checks if check.name.endswith(".applied")]
        of_scope = any(check.entries or check.name.startswith(("scope.", "support.")) for check in witness.checks)
        holds = WITNESSED in seen and seen[WITNESSED].outcome.is_good and others_hold
        return holds and bool(applied) and not of_scope and all(one.kind is CheckKind.BACKEND for one in applied)
    if layer.is_blocked or layer.is_old != witness.is_old:
        return False
    if witness.raised is not None:
        trace, inside = witness.raised.traceback, "in is_judged" in witness.raised.traceback
        same = is_one_failure(witness, layer) and (inside or others_hold)
        return "probes/fp8_linear.py" in trace and (same or (inside and witness.entries == layer.uses))
    low = any(check.precision is Precision.LOW for check in layer.checks)
    of_layer = bool(witness.checks) and all(_OF_THE_LAYER.match(check.name) for check in witness.checks)
    return of_layer and others_hold and low and layer.has(CheckKind.NUMBERS, CheckKind.BACKEND)


def share_cases(cases: Sequence[Case], order: Order) -> tuple[Case, ...]:
    """Cases of what several modules met below their own layers, each by itself, made one case.

    That is a part of Transformer Engine that is wrong in every layer that runs it, a component that modules apart from
    one another met, or many processes that were killed from outside. What belongs to the host is no module's, whoever
    meets it first.
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
        met = [red.module for case in mine for red in case.members if red.met(component)]
        apart = any(order.is_apart(one, other) for one in met for other in met)
        shared = component in OF_THE_HOST or apart if component else len(mine) >= _MANY
        left += [merge_cases(mine, component, order)] if shared else mine
    return tuple(sorted(left, key=lambda case: order.rank(case.first.module)))


def merge_cases(cases: Sequence[Case], component: str, order: Order) -> Case:
    """Several cases as one of a component below Transformer Engine."""
    members = order.sort(red for case in cases for red in case.members)
    # The first one that met it says what it is; one that was kept from running says nothing.
    first = next((red for red in members if red.met(component)), members[0])
    return Case(first, tuple(red for red in members if red is not first), component)


def _share_parts(cases: Sequence[Case], order: Order) -> list[Case]:
    """Cases of wrong numbers in one part that their layers share, made one case of the first module that sees it."""
    left = list(cases)
    for part in SHARED_PARTS:
        groups: dict[bool, list[Case]] = {}
        for case in left:
            if _is_by(part, case.first):
                groups.setdefault(case.first.is_old, []).append(case)
        for mine in groups.values():
            members = order.sort(red for case in mine for red in case.members)
            # Outside of the block, a check that is about one layer shows that this layer by itself is wrong.
            about = (check.entries or red.uses for red in members if red.module != BLOCK for check in red.checks)
            wrong = frozenset[str]().union(*(names for names in about if names and len(names) == 1))
            if len(mine) > 1 and part.shows <= wrong:
                first = order.sort(case.first for case in mine)[0]
                left = [case for case in left if case not in mine]
                left.append(Case(first, tuple(red for red in members if red is not first), part=part))
    return left


def _is_by(part: SharedPart, red: Red) -> bool:
    """Whether numbers alone are wrong, and each of them is about what runs this part, or can be."""
    if red.receipt.outcome is not Outcome.FAIL or red.diagnosis.component or red.diagnosis.cause is not Cause.NUMERICS:
        return False
    # In the block a layer hands what is wrong on to all others: which gradient shows it tells nothing.
    about = (red.uses if check.entries is None or red.module == BLOCK else check.entries for check in red.checks)
    return all(one is None or (part.shows | part.may_show) & one for one in about)
