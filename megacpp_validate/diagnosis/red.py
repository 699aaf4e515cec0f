"""A red module as blame sees it: its signature, what it raised, which checks failed, what its failure is about.

The signature makes two failures one, whichever module, install, run or release shows them. What varies between two
sightings of one fault is taken out of its text: paths, addresses, numbers, shapes, versions, process ids, cells. Names
are kept: an undefined symbol or a lost keyword is the point.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final

from ..evidence.receipt import Backend, Check, Outcome, Receipt
from .checks import CheckKind, FailedCheck, read_failed_checks
from .diagnose import Diagnosis, diagnose_receipt
from .entries import entries_in, of_module
from .raised import Raised, read_raised


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
