"""A red module as blame sees it: its signature, what it raised, which checks failed, what its failure is about.

The signature makes two failures one, whichever module, install, run or release shows them. What varies between two
sightings of one fault is taken out of its text: paths, addresses, numbers, shapes, versions, process ids, cells. Names
are kept: an undefined symbol or a lost keyword is the point.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Final

from ..evidence.receipt import Backend, Check, Outcome, Receipt
from .checks import (
    BLOCK,
    BLOCK_CHAIN,
    FIREWALL,
    CheckKind,
    FailedCheck,
    Precision,
    entries_in,
    of_module,
    read_failed_checks,
)
from .diagnose import Diagnosis, Raised, diagnose_receipt, may_follow, read_raised

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


class Change(StrEnum):
    """What became of one cell between two stacks. Total: every pair of outcomes, and of none, has one."""

    REGRESSED = "regressed"  # good before, bad now
    FIXED = "fixed"  # bad before, good now
    SAME_FAILURE = "same-failure"  # bad before and now, by one signature
    NEW = "new"  # nothing was seen before, or another failure; what is seen now may be good or bad
    LOST = "lost"  # no evidence now: missing, not-run, or blocked by a cell whose failure is not this one's
    UNCHANGED = "unchanged"  # good before and now, or no evidence on either side


_SHOWN: Final = 400  # characters of a signature's text

# In this order: each pattern is written for what the ones before it leave. What replaces has no digit and no slash, so
# that normalising again changes nothing.
_VARYING: Final[tuple[tuple[str, str], ...]] = (
    (r"\x1b\[[0-9;]*m", ""),  # colours of a log
    # Boilerplate that torch adds to every asynchronous error, or to none, by build.
    (r"Search for `\w+' in https?://\S+ for more information\.?", ""),
    (r"CUDA kernel errors might be asynchronously reported.*?(?:incorrect\.|$)", ""),
    (r"For debugging consider passing CUDA_LAUNCH_BLOCKING=\d\.?", ""),
    (r"Compile with `?TORCH_USE_CUDA_DSA`? to enable device-side assertions\.?", ""),
    (r"https?://\S+", "URL"),
    (r"0x[0-9a-fA-F]+", "ADDRESS"),
    (r"\b(?:te|native)[\w.+]*-(?:h200|b200|gb10|cpu)-(\w+)", "CELL"),  # a cell's id
    (r"(?:~|\.{1,2})?(?:/[^\s/:'\"(),;\[\]]+)*/([^\s/:'\"(),;\[\]]+)", r"\1"),  # a path: its last name
    (r"(\.(?:py|cu|cpp|cc|c|cuh|h|hpp|pyx)):\d+(?::\d+)?", r"\1"),  # a line
    (r"(\.so)(?:\.\d+)+", r"\1"),
    (r"\.(?:cpython|abi)[\w-]*\.so", ".so"),
    (r"\bline \d+", "line"),
    (r"torch\.Size\(\[[^\]]*\]\)", "SHAPE"),
    (r"[\[(]\s*-?\d+(?:\s*[,x]\s*-?\d+)*,?\s*[\])]", "SHAPE"),
    (r"\b\d+(?:x\d+)+\b", "SHAPE"),
    (r"\b(?:pid|PID)[ =:]*\d+", "PID"),
    (r"\bv?\d+(?:\.\d+){2,}(?:[a-z]+\d*)?(?:\+[\w.]+)?", "VERSION"),
    (r"(?<![A-Za-z_\d.])[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?(?![A-Za-z_\d])", "N"),
    (r"\bN(?:[ ,x]+N\b)+", "N"),
    (r"\s+", " "),
)
_COMPILED: Final = tuple((re.compile(pattern), new) for pattern, new in _VARYING)


@dataclass(frozen=True)
class Signature:
    """What makes failures one failure.

    Attributes:
        what: exception class, signal, "timeout"; "fail" where checks failed and nothing was raised.
        frame: innermost frame of vendor code, from its package on and without the line; empty where there is none.
        text: normalised.
        checks: kinds of the checks that failed, sorted, each once.
    """

    what: str
    frame: str = ""
    text: str = ""
    checks: tuple[str, ...] = ()

    @property
    def is_of_checks(self) -> bool:
        """Whether checks make it up, and nothing was raised."""
        return bool(self.checks)

    def __str__(self) -> str:
        if self.checks:
            return f"{self.what}: {', '.join(self.checks)}"
        where = f" in {self.frame}" if self.frame else ""
        text = f": {self.text}" if self.text else ""
        return f"{self.what}{where}{text}"[:_SHOWN]


def sign(receipt: Receipt) -> Signature | None:
    """The signature of a receipt's failure; None where it is good, or says nothing.

    A blocked one has that of what blocks it, as far as its reason tells it.
    """
    if receipt.outcome.is_good or receipt.outcome is Outcome.NOT_RUN:
        return None
    if receipt.outcome is Outcome.FAIL:
        kinds = {check.shown for check in read_failed_checks(receipt)}
        return Signature("fail", checks=tuple(sorted(kinds)) or ("unknown",))
    return sign_raised(read_raised(receipt))


def sign_raised(raised: Raised) -> Signature:
    """The signature of what was raised."""
    if raised.died:  # its last words are a log: what else ran then, in which order
        return Signature(raised.kind, raised.frame)
    return Signature(raised.kind, raised.vendor_frame, normalise(raised.text))


def is_same(one: Signature | None, other: Signature | None) -> bool:
    """Whether two failures are one. Of checks: the later one has no kind that the earlier one had not."""
    if one is None or other is None:
        return False
    if one.is_of_checks and other.is_of_checks:
        return set(other.checks) <= set(one.checks)
    return one == other


def normalise(text: str) -> str:
    """A text without what varies between two sightings of one fault. Normalising again changes nothing."""
    text = text[:20_000]
    for _ in range(8):
        made = _once(text)
        if made == text:
            return made
        text = made
    return text


def _once(text: str) -> str:
    for pattern, new in _COMPILED:
        text = pattern.sub(new, text)
    return text.strip()


_LISTED: Final = re.compile(r"'([\w.]+)': ")
_MISMATCH: Final = re.compile(r"parameters (\{[^{}]*\}), not (\{[^{}]*\})")
_NO_ATTRIBUTE: Final = re.compile(r"'(\w+)' object has no attribute '(\w+)'")
_PART: Final = re.compile(r"^(?:query|key|value|qkv)_")  # as the bridge splits the projection of the block
_UNKNOWN: Final = re.compile(r"(?:Unexpected|Missing) key\(s\) in state_dict: (.*?)\.?\s*(?:$|\n)")


def odd_parameters(receipt: Receipt, before: Receipt | None, raised: Raised | None) -> frozenset[str]:
    """Last words of the names of parameters that a failure is about; empty where it is about none.

    Args:
        receipt: of the failure.
        before: of the same probe; what it listed is taken for as it should be.
        raised: what the failure raised; None where only checks failed.
    """
    if raised is not None:
        return _of_text(raised)
    known = {check.name: check for check in before.checks} if before is not None else {}
    found: frozenset[str] = frozenset()
    for check in receipt.checks:
        if not check.passed:
            found |= odd_in_check(check, known.get(check.name))
    return found


def odd_in_check(check: Check, before: Check | None) -> frozenset[str]:
    """The same of one failed check that lists the parameters of a layer."""
    if not check.name.endswith(".parameters") or before is None:
        return frozenset()
    return _new_or_lost(_LISTED.findall(check.detail), _LISTED.findall(before.detail))


def _of_text(raised: Raised) -> frozenset[str]:
    if found := _MISMATCH.search(raised.text):
        return _new_or_lost(_LISTED.findall(found[1]), _LISTED.findall(found[2]))
    if raised.kind == "KeyError" and (key := re.fullmatch(r"'([\w.]+)'", raised.text.strip())):
        return frozenset({_last(key[1])})
    if (lost := _NO_ATTRIBUTE.match(raised.text)) and entries_in(lost[1]):
        return frozenset({lost[2]})
    if found := _UNKNOWN.search(raised.text):
        return frozenset(_last(name) for name in re.findall(r"[\w.]+", found[1]))
    return frozenset()


def meet(some: frozenset[str], others: frozenset[str]) -> bool:
    """Whether two failures are about one parameter; a weight that is split has the part's name before its own."""
    return bool({_PART.sub("", name) for name in some} & {_PART.sub("", name) for name in others})


def _new_or_lost(now: list[str], wanted: list[str]) -> frozenset[str]:
    return frozenset(_last(name) for name in set(now) ^ set(wanted))


def _last(name: str) -> str:
    return name.rpartition(".")[2]


_CALL: Final = re.compile(r"^TypeError: .*(?:unexpected keyword argument|missing \d+ required|takes .* arguments?\b)")


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
        return diagnose_receipt(self.receipt)

    @cached_property
    def uses(self) -> frozenset[str] | None:
        """Accessors of all that the module uses; None for a composition."""
        return of_module(self.module)

    @cached_property
    def entries(self) -> frozenset[str] | None:
        """Accessors of the entry points that its failure is about; None where it can be any.

        Of what was raised: those that its text names, else those of its innermost frame of Transformer Engine.
        """
        if self.raised is not None:
            texts = self.raised.text, self.raised.frame
            # What is not its module's own: the layer that a probe looks through, a recipe that a layer takes.
            known = (*(entries_in(text, self.uses) for text in texts), *(entries_in(text) for text in texts))
            said = next(filter(None, known), None)
            return frozenset(said) if said else None
        found: set[str] = set()
        for check in self.checks:
            if check.entries is None:
                return None
            found |= check.entries
        return frozenset(found) or None

    @cached_property
    def parameters(self) -> frozenset[str]:
        """Last words of parameters that are there now and were not, or the other way round."""
        return odd_parameters(self.receipt, self.before, self.raised)

    def parameters_of(self, name: str) -> frozenset[str]:
        """The same of one of its failed checks."""
        now = next((check for check in self.receipt.checks if check.name == name and not check.passed), None)
        known = () if self.before is None else self.before.checks
        return frozenset() if now is None else odd_in_check(now, next((c for c in known if c.name == name), None))

    @property
    def fallbacks(self) -> tuple[Backend, ...]:
        """Paths that took another backend than was asked for, and did not do so before."""
        known = () if self.before is None else tuple((row.path, row.claimed) for row in self.before.backends)
        rows = (row for row in self.receipt.backends if row.requested not in (row.claimed, *row.observed))
        return tuple(row for row in rows if (row.path, row.claimed) not in known)

    @property
    def fits_no_call(self) -> bool:
        """Whether an entry point does not take what it is called with: its own code alone decides that."""
        raised = self.raised
        return raised is not None and bool(_CALL.search(raised.line)) and bool(entries_in(raised.text))

    @property
    def is_blocked(self) -> bool:
        """Whether another cell stands in its way."""
        return self.receipt.outcome is Outcome.BLOCKED

    @property
    def was_good(self) -> bool:
        """Whether it held before."""
        return self.before is not None and self.before.outcome.is_good

    @property
    def saw_itself(self) -> bool:
        """Whether it met its failure itself, instead of being kept from running."""
        return not self.is_blocked

    def has(self, kind: CheckKind) -> bool:
        """Whether a check of this kind failed."""
        return any(check.kind is kind for check in self.checks)
