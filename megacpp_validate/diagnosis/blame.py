"""Who is to blame for red modules: a culprit is red and explained by no other one; the rest are cascades of one.

First in dependency order comes first. What several modules that do not depend on one another meet below Transformer
Engine (one component, each by itself) is nobody's but the environment's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, TypeGuard

from ..evidence.receipt import Outcome, Receipt
from ..evidence.values import ENVIRONMENT, Cause
from .checks import BLOCK, FIREWALL, SHARED_PARTS, CheckKind, Precision, SharedPart
from .red import WITNESSES, Change, Link, Red, explains, is_one_failure
from .rows import OF_THE_HOST

_TELLING: Final = 12  # characters of a text that two failures do not share by chance
_SCOPE_FILES: Final = (
    "bridge/fp8_scope.py", "bridge/graph_capture.py", "bridge/layer_watch.py", "bridge/open_scopes.py",
    "bridge/pending_amax.py", "bridge/recipes.py", "bridge/recompute", "bridge/te_fp8.py", "bridge/zones.py",
)  # fmt: skip
_SEEN_THROUGH: Final = re.compile(
    r"(?:fp8\.\w+\.(?:forward|dgrad|wgrad|bias|finite|blocks|backend)(?:\.applied)?|second-use)$"
)
_OTHERS_IN_LOW_PRECISION: Final = ("expert_gemm", "layer_spec")
_MANY: Final = 3  # so many cases that were killed from outside are one
_BELOW: Final = (Cause.ENVIRONMENT, Cause.BINARY)
_LEVELS: Final = (Precision.FP32, Precision.HALF, Precision.LOW, Precision.ANY)
_APPLIED: Final = re.compile(r"fp8\.(\w+)\.\w+\.applied$")
_ROUNDED: Final = re.compile(r"fp8\.(\w+)\..*\.rounded$")


Module: TypeAlias = Any
"""A row of bridge modules: `catalog.bridge.BridgeModule`, whose room lies above this one."""


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


@dataclass(frozen=True)
class Order:
    """Modules in dependency order, and what each stands on, directly or not; compositions stand on all modules."""

    names: tuple[str, ...]
    below: Mapping[str, frozenset[str]] = field(repr=False)

    def rank(self, name: str) -> tuple[int, str]:
        """To sort by."""
        return (self.names.index(name), name) if name in self.names else (len(self.names), name)

    def depends(self, name: str, other: str) -> bool:
        """Whether a fault of `other` can reach `name`."""
        return other in self.below[name] if name in self.below else other in self.names

    def is_apart(self, one: str, other: str) -> bool:
        """Whether neither stands on the other."""
        return one != other and not self.depends(one, other) and not self.depends(other, one)


def read_order(modules: Sequence[Module]) -> Order:
    """The order of the matrix; what a module names that comes after it, it stands on alone."""
    below: dict[str, frozenset[str]] = {}
    for module in modules:
        names = set(module.depends_on)
        for other in module.depends_on:
            names |= below.get(other, frozenset())
        below[module.id] = frozenset(names - {module.id})
    return Order(tuple(module.id for module in modules), below)


def has_evidence(receipt: Receipt | None) -> bool:
    """Whether a receipt says anything about its cell: a missing receipt and `not-run` do not."""
    return receipt is not None and receipt.outcome is not Outcome.NOT_RUN


def is_red(receipt: Receipt | None) -> TypeGuard[Receipt]:
    """Whether a receipt says that its cell does not hold; a time limit and a blocked cell included."""
    return receipt is not None and has_evidence(receipt) and not receipt.outcome.is_good


def find_blockers(receipts: Mapping[str, Receipt], hosts: Collection[str]) -> dict[str, Receipt | None]:
    """Blocked module -> the red receipt that stands behind it; None where none does.

    Args:
        receipts: by module.
        hosts: modules that met a fault of the host, which is not red.
    """
    by_cell = {one.cell: one for name, one in receipts.items() if name not in hosts or one.outcome is Outcome.BLOCKED}

    def behind(receipt: Receipt) -> Receipt | None:
        met: set[str] = set()
        following: Receipt | None = receipt
        while following is not None and following.outcome is Outcome.BLOCKED and following.cell not in met:
            met.add(following.cell)
            following = by_cell.get(following.blocked_by)
        return following if is_red(following) and following.outcome is not Outcome.BLOCKED else None

    return {name: behind(one) for name, one in receipts.items() if one.outcome is Outcome.BLOCKED}


def worst_of(receipts: Iterable[Receipt]) -> dict[str, Receipt]:
    """One receipt a probe: of several the red one; of several red ones always the same, whatever their order."""
    found: dict[str, Receipt] = {}
    for receipt in receipts:
        other = found.get(receipt.probe)
        if other is None or _badness(receipt) > _badness(other):
            found[receipt.probe] = receipt
    return found


def blame(receipts: Iterable[Receipt], modules: Sequence[Module]) -> Blame:
    """File the red receipts of one environment, with nothing to compare them with.

    Args:
        receipts: in any order; several of one probe are one that is red if any is.
        modules: in dependency order.
    """
    found = worst_of(receipts)
    order = read_order(modules)
    reds = [Red(probe, receipt) for probe, receipt in found.items() if is_red(receipt)]
    good = {probe for probe, receipt in found.items() if receipt.outcome.is_good}
    cases = file_reds(reds, order, good)
    rows = [(red.module, case.first.module) for case in cases for red in case.others]
    return Blame(tuple(case.first.module for case in cases), tuple(sorted(rows, key=lambda row: order.rank(row[0]))))


def file_reds(reds: Iterable[Red], order: Order, good: Collection[str]) -> tuple[Case, ...]:
    """Every red module in one case, in dependency order of the first ones.

    Args:
        reds: one a module.
        good: modules that hold: what they share with a red one is well.
    """
    ranked = sorted(reds, key=lambda red: order.rank(red.module))
    seen_through = _seen_through(ranked, good)
    ranked.sort(key=lambda red: red.module in seen_through)  # after the module whose layer it looks through
    roots: dict[str, Red] = {}  # module -> the culprit that it is filed under
    for effect in ranked:
        roots[effect.module] = _root_of(effect, ranked, roots, order, seen_through)
    cases = [
        Case(root, tuple(red for red in ranked if roots[red.module] is root and red is not root))
        for root in ranked
        if roots[root.module] is root
    ]
    in_order = [Case(c.first, tuple(sorted(c.others, key=lambda red: order.rank(red.module)))) for c in cases]
    return tuple(sorted(in_order, key=lambda case: order.rank(case.first.module)))


def share_cases(cases: Sequence[Case], order: Order) -> tuple[Case, ...]:
    """Cases of one component that modules apart from one another met, each by itself, made one of that component.

    What belongs to the host is no module's, whoever meets it first.
    """
    left, shared = list(cases), list[Case]()
    for component in dict.fromkeys(case.first.diagnosis.component for case in cases):
        mine = [case for case in left if _is_of(case, component)]
        met = [red.module for case in mine for red in case.members if _met(red, component)]
        if component not in OF_THE_HOST and not any(order.is_apart(one, other) for one in met for other in met):
            continue
        if not mine:
            continue
        left = [case for case in left if case not in mine]
        shared.append(merge_cases(mine, component, order))
    killed = [case for case in left if _is_killed(case.first)]
    if len(killed) >= _MANY:  # one by one they may be faults; so many are a host that ran out of something
        left = [case for case in left if case not in killed]
        shared.append(merge_cases(killed, "", order))
    return tuple(sorted((*left, *shared), key=lambda case: order.rank(case.first.module)))


def merge_cases(cases: Sequence[Case], component: str, order: Order) -> Case:
    """Several cases as one of a component below Transformer Engine."""
    members = sorted((red for case in cases for red in case.members), key=lambda red: order.rank(red.module))
    # The first one that met it says what it is; one that was kept from running says nothing.
    first = next((red for red in members if _met(red, component)), members[0])
    return Case(first, tuple(red for red in members if red is not first), component)


def _is_killed(red: Red) -> bool:
    """Whether its process was ended from outside, and nothing says by what."""
    died = red.raised is not None and red.raised.died and red.change is not Change.SAME_FAILURE
    return died and red.diagnosis.cause is Cause.ENVIRONMENT and not red.diagnosis.component


def _is_of(case: Case, component: str) -> bool:
    return bool(component) and _met(case.first, component) and case.first.change is not Change.SAME_FAILURE


def _met(red: Red, component: str) -> bool:
    found = red.diagnosis
    return red.saw_itself and found.component == component and found.cause in _BELOW


def _root_of(
    effect: Red, ranked: Sequence[Red], roots: dict[str, Red], order: Order, seen_through: Mapping[str, str]
) -> Red:
    """The culprit that a module is filed under; itself where no other explains it."""
    found: list[tuple[Link, Red]] = []
    for cause in ranked[: ranked.index(effect)]:
        if seen_through.get(effect.module) == cause.module:
            return roots[cause.module]
        if cause.module in seen_through or _is_older(roots[cause.module], effect):
            continue
        if link := _link(cause, effect, order):
            found.append((link, cause))
    if not found:
        return effect
    strongest = max(link for link, _ in found)
    causes = [cause for link, cause in found if link == strongest]
    direct = next((cause for cause in causes if roots[cause.module] is cause), None)
    if direct is not None:
        return direct
    cause = causes[0]
    if strongest is Link.CHECKS and cause.raised is None:
        # What the culprit above it cannot lead to shows that the cause has a fault of its own, too.
        roots[cause.module] = cause
        return cause
    return roots[cause.module]


def _is_older(culprit: Red, effect: Red) -> bool:
    """Whether a culprit failed in the same way while a module held, which met what broke it now itself."""
    return culprit.change is Change.SAME_FAILURE and effect.was_good and effect.saw_itself


def _link(cause: Red, effect: Red, order: Order) -> Link:
    if order.depends(effect.module, cause.module):
        return explains(cause, effect)
    if effect.is_blocked:
        link = explains(cause, effect)
        return link if effect.receipt.blocked_by == cause.receipt.cell else Link.NONE
    if not is_one_failure(cause, effect) or not _tells(cause):
        return Link.NONE
    link = explains(cause, effect)
    return link if link is Link.SAME else Link.NONE


def _tells(red: Red) -> bool:
    """Whether a signature says more than how a process ended."""
    return len(red.signature.text) >= _TELLING or bool(red.signature.frame)


def _seen_through(ranked: Sequence[Red], good: Collection[str]) -> dict[str, str]:
    """Modules that are red only for the layer that they look through -> the module whose layer that is."""
    by_name = {red.module: red for red in ranked}
    pairs = ((by_name.get(looks), by_name.get(layer)) for looks, layer in WITNESSES.items())
    return {one.module: other.module for one, other in pairs if one and other and _looks_through(one, other, good)}


def _looks_through(witness: Red, layer: Red, good: Collection[str]) -> bool:
    if not layer.saw_itself or (layer.change is Change.SAME_FAILURE) != (witness.change is Change.SAME_FAILURE):
        return False
    others_hold = any(module in good for module in _OTHERS_IN_LOW_PRECISION)
    if witness.raised is not None:
        trace, inner = witness.raised.traceback, witness.raised.bridge[-1:]
        through = ("probes/fp8_linear.py" in trace and not inner) or "in is_judged" in trace
        of_layer = "in is_judged" in trace or others_hold or witness.entries == layer.uses
        scope = any(frame.startswith(_SCOPE_FILES) for frame in inner)
        return through and not scope and is_one_failure(witness, layer) and of_layer
    low = any(check.precision is Precision.LOW for check in layer.checks)
    numbers = layer.has(CheckKind.NUMBERS) or layer.has(CheckKind.BACKEND)
    only = bool(witness.checks) and all(_SEEN_THROUGH.match(check.name) for check in witness.checks)
    return witness.module == FIREWALL and only and low and numbers and others_hold


def _badness(receipt: Receipt) -> tuple[bool, bool, bool, str]:
    ran = is_red(receipt)
    return (
        ran,
        not receipt.outcome.is_good if ran else receipt.outcome.is_good,
        receipt.failure is not None,
        repr(receipt),
    )


def share_layers(cases: Sequence[Case], order: Order) -> tuple[Case, ...]:
    """Cases of wrong numbers in one part that their layers share, made one case of the first module that sees it."""
    left = list(cases)
    for part in SHARED_PARTS:
        for way in dict.fromkeys(_way(case.first) for case in left):
            mine = [case for case in left if _way(case.first) == way and _is_by(part, case.first)]
            if len(mine) > 1 and part.shows <= _seen_wrong(red for case in mine for red in case.members):
                left = [case for case in left if case not in mine]
                first = min((case.first for case in mine), key=lambda red: order.rank(red.module))
                others = (red for case in mine for red in case.members if red is not first)
                in_order = tuple(sorted(others, key=lambda red: order.rank(red.module)))
                left.append(Case(first, in_order, part=part))
    return tuple(sorted(left, key=lambda case: order.rank(case.first.module)))


def _way(red: Red) -> tuple[bool, bool, int]:
    """Whether it failed so before, whether the forward pass is wrong, and the highest precision in which it is."""
    numbers = [check for check in red.checks if check.kind is CheckKind.NUMBERS]
    forward = any(check.backward is False for check in numbers)
    level = min((_LEVELS.index(check.precision) for check in numbers), default=len(_LEVELS))
    return red.change is Change.SAME_FAILURE, forward, level


def _is_by(part: SharedPart, red: Red) -> bool:
    """Whether numbers alone are wrong, and each of them is about what runs this part, or can be."""
    reach = part.shows | part.may_show
    # In the block a layer hands what is wrong on to all others: which gradient shows it tells nothing.
    about = (red.uses if check.entries is None or red.module == BLOCK else check.entries for check in red.checks)
    numbers = red.receipt.outcome is Outcome.FAIL and red.diagnosis.cause is Cause.NUMERICS
    return numbers and not red.diagnosis.component and all(one is None or reach & one for one in about)


def _seen_wrong(reds: Iterable[Red]) -> frozenset[str]:
    """Accessors that are wrong by themselves: a check outside of the block is about nothing else."""
    found: set[str] = set()
    for red in reds:
        for check in red.checks if red.module != BLOCK else ():
            about = check.entries if check.entries is not None else red.uses
            if check.kind is CheckKind.NUMBERS and about is not None and len(about) == 1:
                found |= about
    return frozenset(found)


def name_the_layer(case: Case, receipts: Mapping[str, Receipt]) -> Case:
    """The case of the layer that the firewall's probe looks through, where that layer alone leaves the scope.

    The firewall saw no low precision in it, in recipes in which another module shows that it ran: so the scope is well.

    Args:
        case: as it was filed.
        receipts: of all modules.
    """
    layer = WITNESSES[FIREWALL]
    if case.first.module != FIREWALL or case.shared is not None or layer not in receipts:
        return case
    if not receipts[layer].outcome.is_good or any(red.module == layer for red in case.others):
        return case
    if not _missed(case.first.receipt) & _shown(receipts):
        return case
    return Case(replace(case.first, module=layer), case.members)


def _missed(receipt: Receipt) -> set[str]:
    """Recipes that did not run in the layer; empty where a check of the scope itself failed."""
    if any(not check.passed and check.name.startswith(("scope.", "accessor.", "support.")) for check in receipt.checks):
        return set()
    failed = {check.name: {part.name for part in check.parts if not part.passed} for check in receipt.checks}
    found = ((_APPLIED.match(name), parts) for name, parts in failed.items())
    missed = {one[1]: "low-precision-ran" in parts for one, parts in found if one and parts}
    return set(missed) if missed and all(missed.values()) else set()


def _shown(receipts: Mapping[str, Receipt]) -> set[str]:
    """Recipes that other modules show to have run."""
    checks = (check for receipt in receipts.values() for check in receipt.checks if receipt.probe != FIREWALL)
    rounded = [(found[1], check.passed) for check in checks if (found := _ROUNDED.match(check.name))]
    return {recipe for recipe, passed in rounded if passed} - {recipe for recipe, passed in rounded if not passed}
