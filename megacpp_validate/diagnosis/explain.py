"""Whether the failure of one module explains that of another which depends on it.

An effect is a cascade where it shows what the cause must lead to, not wherever it stands later in the order: two faults
may well lie in modules of which one depends on the other. What neither side tells is taken for the same fault; what
tells them apart is another entry point, another class of exception, or a direction or precision that the cause left
whole.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Final

from ..evidence.receipt import Outcome
from .checks import CheckKind, FailedCheck, Precision
from .diagnose import may_follow
from .entries import BLOCK, BLOCK_CHAIN, FIREWALL, entries_in
from .red import Change, Red, meet

# The firewall's probe looks at the scope through a linear layer: a fault of that layer is seen there first, and is none
# of the scope's. Module that looks -> module whose layer it looks through.
WITNESSES: Final = {FIREWALL: "linear_walker"}
_SHAPES: Final = re.compile(
    r"\bshapes?\b|\bsizes?\b|\bdimension|split_sizes|out of bounds|broadcast|\bdtype|WeightMismatch|contiguous|stride|"
    r"divisible|multiples?\b|\balign",
    re.IGNORECASE,
)
_QUOTED: Final = re.compile(r"\w \w.*['`]\w{2,}['`]|undefined symbol: \w+")
_ENTRY: Final = "VendorEntryMissing"
_LEVEL: Final = {Precision.FP32: 0, Precision.HALF: 1, Precision.LOW: 2}


class Link(IntEnum):
    """How strongly a failure explains another; 0 is not at all."""

    NONE = 0
    CHECKS = 1  # the checks that failed are what the cause leads to
    KIND = 2  # raised for one class of cause, over entry points in common
    SAME = 3  # one failure, seen twice
    BLOCKED = 4  # the effect never ran


def explains(cause: Red, effect: Red) -> Link:
    """How the failure of `cause` explains that of `effect`, which depends on it."""
    if effect.is_blocked:
        return _explains_blocked(cause, effect)
    if cause.change is Change.SAME_FAILURE and effect.was_good:
        return Link.NONE  # it failed in the same way while the effect was good: what took it there is new
    if effect.change is Change.SAME_FAILURE and cause.change is not Change.SAME_FAILURE:
        return Link.NONE  # the effect was there before the cause
    return _explains_seen(cause, effect)


def is_one_failure(one: Red, other: Red) -> bool:
    """Whether two failures are one by their signature; checks alone have none that would tell two faults apart.

    A text that quotes a name says enough: a call that no longer fits is met by the bridge here, and inside Transformer
    Engine there.
    """
    if one.raised is not None and other.raised is not None and meet(one.parameters, other.parameters):
        return True  # one layer has another parameter, and each meets it in its own way
    mine, theirs = one.signature, other.signature
    if mine.is_of_checks or theirs.is_of_checks:
        return False
    quoted = mine.what == theirs.what and mine.text == theirs.text and bool(_QUOTED.search(mine.text))
    return mine == theirs or quoted


def _explains_blocked(cause: Red, effect: Red) -> Link:
    blocked_by = effect.receipt.blocked_by
    if blocked_by and blocked_by == cause.receipt.cell:
        return Link.BLOCKED
    return Link.BLOCKED if cause.is_blocked and blocked_by == cause.receipt.blocked_by else Link.NONE


def _explains_seen(cause: Red, effect: Red) -> Link:
    if is_one_failure(cause, effect):
        return Link.SAME
    if cause.receipt.outcome is Outcome.IMPORT_ERROR and not effect.receipt.checks:
        return Link.BLOCKED  # it never came as far as its first check
    if cause.raised is not None and effect.raised is not None:
        raised = _explains_raised(cause, effect)
        return raised if raised else _by_checks_of(cause, effect)
    if effect.raised is not None:
        return _by_checks_of(cause, effect)
    return Link.CHECKS if _explains_checks(cause, effect) else Link.NONE


def _explains_raised(cause: Red, effect: Red) -> Link:
    """Both raised, and not the same: one fault may still lead to two exceptions."""
    if not _meet(cause.entries, effect.entries):
        return Link.NONE
    mine, theirs = cause.diagnosis, effect.diagnosis
    if mine.component != theirs.component:
        return Link.NONE
    if cause.entries and effect.entries:
        return Link.KIND
    if mine.component:
        return Link.KIND
    one, other = cause.raised, effect.raised
    alike = one is not None and other is not None and (one.kind == other.kind or one.died == other.died)
    if one is not None and other is not None and one.kind == _ENTRY != other.kind and other.vendor_frame:
        return Link.NONE  # raised by Transformer Engine, which does not take its entry points through the bridge
    return Link.KIND if alike and mine.cause is theirs.cause and _may_be_one(cause, effect) else Link.NONE


def _may_be_one(cause: Red, effect: Red) -> bool:
    """Whether nothing that two exceptions miss tells them apart."""
    mine, theirs = cause.diagnosis.missing, effect.diagnosis.missing
    return not (mine and theirs) or mine == theirs


def _by_checks_of(cause: Red, effect: Red) -> Link:
    """The effect raised: by what the cause handed on, or what a check of the cause saw raised."""
    said = effect.raised.line if effect.raised else ""
    if any(check.raised and check.raised[:200] in said for check in cause.checks):
        return Link.SAME
    for check in cause.checks:
        if check.kind is CheckKind.ENTRY and check.entries and effect.entries and check.entries & effect.entries:
            return Link.SAME
    if cause.raised is not None and not (cause.checks and may_follow(cause.raised)):
        return Link.NONE
    if effect.raised is not None and effect.raised.kind == effect.receipt.outcome.value:
        return Link.CHECKS  # it says nothing that would tell it apart
    reach = cause.entries if cause.entries is not None else cause.uses
    about = effect.entries if effect.entries is not None else effect.uses
    handed = (cause.has(CheckKind.NUMBERS) or cause.has(CheckKind.CONTRACT)) and bool(_SHAPES.search(said))
    if not _meet(reach, about):
        # Raised where something of a wrong shape was taken: whose frame that is says nothing of who made it.
        taken = effect.raised is not None and not entries_in(effect.raised.text, effect.uses)
        return Link.CHECKS if handed and taken and _meet(reach, effect.uses) else Link.NONE
    if effect.entries is not None and cause.entries is not None:
        return Link.CHECKS
    return Link.CHECKS if handed else Link.NONE


def _explains_checks(cause: Red, effect: Red) -> bool:
    """Whether every check that failed in the effect can come from the cause."""
    if not cause.receipt.checks and not effect.receipt.checks:
        return cause.receipt.outcome is Outcome.FAIL or cause.receipt.failure is None  # neither says anything
    telling = [check for check in effect.checks if check.name != "second-use"] or list(effect.checks)
    return bool(telling) and all(_explains_check(cause, effect, check) for check in telling)


def _explains_check(cause: Red, effect: Red, check: FailedCheck) -> bool:
    if check.raised and cause.raised is not None and cause.raised.text[:200] in check.raised:
        return True
    if meet(cause.parameters, effect.parameters_of(check.name)):
        return True
    reach = cause.entries if cause.entries is not None else cause.uses
    # In the block a gradient is one layer's, and made by all: what it is about is told by the chain of layers.
    whole = check.entries is None or (effect.module == BLOCK and check.kind is CheckKind.NUMBERS)
    about = effect.uses if whole else check.entries
    if cause.module == FIREWALL:
        return _explained_by_the_scope(cause, check, about)
    if not _meet(reach, about):
        return False
    if cause.raised is not None and check.kind in (CheckKind.BACKEND, CheckKind.RAISED, CheckKind.CONTRACT):
        return True  # what raises is passed over
    return any(_leads_to(one, check, effect, cause) for one in cause.checks)


def _explained_by_the_scope(cause: Red, check: FailedCheck, about: frozenset[str] | None) -> bool:
    """A fault of the scope shows in low precision; one that leaks shows anywhere; a lost entry in what uses it."""
    for one in cause.checks:
        if one.kind is CheckKind.ENTRY:
            if _meet(one.entries, about):
                return True
            continue
        if one.name.startswith(("refuses", "availability", "support", "scope.refuses", "scope.second-entry")):
            continue
        leaks = one.precision is Precision.HALF or "restored" in one.name
        if leaks or check.precision in (Precision.LOW, Precision.ANY):
            return True
    return False


def _leads_to(one: FailedCheck, check: FailedCheck, effect: Red, cause: Red) -> bool:
    """Whether a failed check of the cause can lead to one of the effect."""
    if check.kind in (CheckKind.BACKEND, CheckKind.CONTRACT, CheckKind.ENTRY):
        return one.kind in (CheckKind.BACKEND, CheckKind.CONTRACT, CheckKind.RAISED) and _is_reached(one, check)
    if check.kind is CheckKind.RAISED:
        return one.kind is CheckKind.RAISED or one.shape
    if one.kind is CheckKind.CONTRACT:  # what should be refused or native is computed, and wrongly
        return check.kind is CheckKind.NUMBERS
    if not _is_reached(one, check):
        return False
    if one.backward and check.backward is not True:
        return False  # gradients come after the forward pass
    return not one.backward or _is_upstream(cause, effect, check)


def _is_reached(one: FailedCheck, check: FailedCheck) -> bool:
    """A fault in some precision shows in those below it, which compute in it, too, or are bounded less tightly."""
    if Precision.ANY in (one.precision, check.precision):
        return True
    return _LEVEL[one.precision] <= _LEVEL[check.precision]


def _is_upstream(cause: Red, effect: Red, check: FailedCheck) -> bool:
    """A gradient that is wrong in one layer of the block is so in those before it, and not in those after it."""
    if effect.module != BLOCK or check.entries is None:
        return True
    reach = cause.entries if cause.entries is not None else cause.uses
    last = max((BLOCK_CHAIN.index(name) for name in reach or BLOCK_CHAIN if name in BLOCK_CHAIN), default=None)
    return last is None or any(BLOCK_CHAIN.index(name) <= last for name in check.entries if name in BLOCK_CHAIN)


def _meet(one: frozenset[str] | None, other: frozenset[str] | None) -> bool:
    """Whether two failures can be about one entry point; of one that tells none, that may be."""
    return one is None or other is None or bool(one & other)
