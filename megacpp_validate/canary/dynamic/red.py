"""A red module as blame sees it: its receipt, read once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from ...evidence.receipt import Backend, Outcome, Receipt
from .causes import Diagnosis, diagnose
from .entries import entries_in, of_module
from .failed_checks import CheckKind, FailedCheck, read_failed_checks
from .parameters import odd_in_check, odd_parameters
from .raised import Raised, read_raised
from .signature import Signature, sign
from .upgrade_result import Change

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
        return diagnose(self.receipt)

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
