"""What a failure means: its class of cause, the component below Transformer Engine at fault, and what to do.

What the exception says of itself comes before where it was raised, and that before what its class is commonly raised
for. All patterns stand in `rows.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..evidence.receipt import FROM_OUTSIDE, Outcome, Receipt
from ..evidence.values import Cause
from .checks import CheckKind, FailedCheck, read_failed_checks
from .host_faults import find_host_fault, find_retry_fault, read_host_fault
from .raised import BY_SIGNAL, Raised, read_raised
from .rows import (
    CALL_ERRORS,
    CRASHES,
    OWN,
    PYTHON_RULES,
    RULES,
    SYSTEM,
    TORCH,
    WANTED,
    WANTS,
    component_named,
    framed_by,
    owner_of,
    said_by,
)  # fmt: skip

_TE: Final = re.compile(r"transformer_engine(?:_cu\d+)?(?:\.|$)")
# Raised by who was handed something wrong, outside of vendor code: where checks failed before it, they saw what.
_FOLLOWS: Final = frozenset(
    {"KeyError", "IndexError", "AttributeError", "AssertionError", "RuntimeError", "ValueError"}
)
_MISSING: Final = re.compile(
    r"unexpected keyword argument '(\w+)'|missing \d+ required (?:positional|keyword-only) arguments?: '(\w+)'|"
    r"(?<!'NoneType' object )(?<!'tuple' object )has no attribute '(\w+)'|"
    r"cannot import name '(\w+)'|entry point `(\w+)`|No module named '([\w.]+)'|"
    r"KeyError: '(\w+)'"
)
_ADVICE: Final = {
    Cause.ENVIRONMENT: "install the version of the component that this release needs",
    Cause.BINARY: "reinstall or rebuild the compiled parts for this stack as one",
    Cause.API: "adapt the call of the bridge, or stay on the release before",
    Cause.NUMERICS: "stay on the release before, or take the native path until the check is in its bounds again",
    Cause.SILENT_FALLBACK: "mend what the requested backend was passed over for",
    Cause.PERFORMANCE: "run the cell alone with a longer limit, to tell slow from hung",
    Cause.BOUNDARY: "turn features off one by one in both releases (`nox -s ablate`)",
}


@dataclass(frozen=True)
class Diagnosis:
    """What a failure means.

    Attributes:
        component: at fault below Transformer Engine; empty where none is.
        missing: the symbol, library, package, keyword or name that is missing or unknown; empty where none is.
        seen: where the row comes from; empty where no row but a general rule has the answer.
        of_the_host: the host did it: the failure says nothing of the release.
        retry: an infrastructure fault: the cell may be run again.
    """

    cause: Cause
    component: str = ""
    missing: str = ""
    seen: str = ""
    of_the_host: bool = False
    retry: bool = False

    @property
    def step(self) -> str:
        """Identifier of the next step: the class of cause, and the component where its advice is its own."""
        own = component_named(self.component).advice if self.component else ""
        return f"{self.cause.value}/{self.component.lower().replace(' ', '-')}" if own else self.cause.value

    @property
    def next_step(self) -> str:
        """What to do, as far as the failure alone shows it; `next_steps.next_step` knows versions and releases, too."""
        return (component_named(self.component).advice if self.component else "") or _ADVICE[self.cause]


def diagnose(failure: Receipt | str) -> Diagnosis:
    """What a red receipt, or an exception as "class: text", means. Of a receipt that is not red, nothing of use."""
    if isinstance(failure, str):
        kind, _, text = failure.partition(": ")
        raised = Raised(kind, text, died=bool(BY_SIGNAL.match(kind)) or kind == "timeout")
        return replace(diagnose_raised(raised), of_the_host=bool(read_host_fault(failure)))
    retry = find_retry_fault(failure) is not None
    return replace(diagnose_receipt(failure), of_the_host=bool(find_host_fault(failure)), retry=retry)


def diagnose_receipt(receipt: Receipt) -> Diagnosis:
    """The cause of a red receipt, whoever brought it about."""
    if receipt.outcome is Outcome.FAIL:
        return diagnose_checks(read_failed_checks(receipt))
    raised = read_raised(receipt)
    found = diagnose_raised(raised)
    if found.cause is Cause.API and not found.component and may_follow(raised):
        checks = read_failed_checks(receipt)
        seen = diagnose_checks(checks) if checks else found
        return seen if seen.cause in (Cause.SILENT_FALLBACK, Cause.NUMERICS) else found
    return found


def may_follow(raised: Raised) -> bool:
    """Whether it is what checks that failed before it lead to: raised outside of vendor code, over a value."""
    return raised.kind in _FOLLOWS and not raised.vendor_frame


def diagnose_raised(raised: Raised) -> Diagnosis:
    """The cause of an exception, or of how a process ended."""
    found = _by_rule(raised) or _by_python(raised) or _by_component(raised)
    if found:
        return found
    frame, text = framed_by(raised.vendor_frame), raised.text
    if SYSTEM.match(text):
        return Diagnosis(Cause.ENVIRONMENT, frame)
    if raised.kind in CALL_ERRORS:
        refuses = frame and raised.kind in ("ValueError", "AssertionError", "NotImplementedError")
        return Diagnosis(Cause.ENVIRONMENT if refuses else Cause.API, frame, _missing(raised))
    if CRASHES.search(text):
        return Diagnosis(Cause.BINARY, framed_by(raised.frame))
    if raised.died:
        return Diagnosis(_cause_of_end(raised.kind), framed_by(raised.frame))
    return Diagnosis(Cause.API, frame, _missing(raised))


def diagnose_checks(checks: Sequence[FailedCheck]) -> Diagnosis:
    """The cause of checks that failed, where nothing was raised beside them."""
    component = _owner_of_checks(checks)
    kinds = {check.kind for check in checks}
    if CheckKind.ENTRY in kinds:
        named = sorted({entry for check in checks if check.kind is CheckKind.ENTRY for entry in check.entries or ()})
        return Diagnosis(Cause.API, component, ", ".join(named))
    if raised := next((check.raised for check in checks if check.raised and check.kind is CheckKind.RAISED), ""):
        kind, _, text = raised.partition(": ")
        found = diagnose_raised(Raised(kind, text))
        return found if found.component else replace(found, component=component)
    if CheckKind.BACKEND in kinds:
        return Diagnosis(Cause.SILENT_FALLBACK, component)
    if CheckKind.NUMBERS in kinds:
        # Every value is in bounds, and is not that of the recipe that was asked for: another recipe ran.
        names = [check.name for check in checks if check.kind is CheckKind.NUMBERS]
        another = all(name.endswith((".applied", ".blocks")) for name in names)
        return Diagnosis(Cause.SILENT_FALLBACK if another else Cause.NUMERICS, component)
    return Diagnosis(Cause.PERFORMANCE if CheckKind.MEMORY in kinds else Cause.API, component)


def _owner_of_checks(checks: Sequence[FailedCheck]) -> str:
    """The component that every failed check is about: FlashAttention and DeepGEMM have checks of their own."""
    owners = {"fa3": "flash-attn", "fa4": "flash-attn", "deep_gemm": "DeepGEMM"}
    found = {next((owners[w] for w in check.name.split(".") if w in owners), "") for check in checks}
    return found.pop() if len(found) == 1 else ""


def _by_rule(raised: Raised) -> Diagnosis | None:
    said = f"{raised.kind}: {raised.text}"
    for rule in RULES:
        if (found := re.search(rule.pattern, said)) is None:
            continue
        name = found[1] if found.re.groups else ""
        if not rule.owned:
            return Diagnosis(rule.cause, rule.component, name, rule.seen)
        owner = owner_of(name)
        # A part of Transformer Engine itself that is missing: nothing around it is at fault.
        return Diagnosis(Cause.BINARY if owner == OWN else rule.cause, owner or OWN, name, rule.seen)
    return None


def _by_python(raised: Raised) -> Diagnosis | None:
    """A module or name of a Python package that is missing."""
    package = next((found[1] for rule in PYTHON_RULES if (found := re.search(rule, raised.text))), None)
    if package is None:
        return None
    if package.startswith("transformer_engine_torch"):  # the sources and the compiled extension are of two builds
        return Diagnosis(Cause.BINARY, OWN, _missing(raised))
    if _TE.match(package):
        return Diagnosis(Cause.API, OWN, _missing(raised))
    return Diagnosis(Cause.ENVIRONMENT, owner_of(package) or package.partition(".")[0], _missing(raised))


def _by_component(raised: Raised) -> Diagnosis | None:
    """A library that answers with an error, or a release that says which version of a library it needs."""
    if component := said_by(f"{raised.kind}: {raised.text}"):
        cause = Cause.API if raised.kind in ("TypeError", "AttributeError") else Cause.ENVIRONMENT
        return Diagnosis(cause, component, seen=component_named(component).seen)
    if (found := WANTS.search(raised.text)) is None:
        return None
    return Diagnosis(Cause.ENVIRONMENT, WANTED.get(found["name"].lower(), "flash-attn"))


def _cause_of_end(kind: str) -> Cause:
    """Of a process that ended by itself, or had to be ended."""
    if kind == "timeout":  # all that is known is that the cell takes too long
        return Cause.PERFORMANCE
    outside = kind in FROM_OUTSIDE or kind in ("SIGXCPU", "no-receipt")  # memory, a scheduler, a full disk
    return Cause.ENVIRONMENT if outside else Cause.BINARY


def _missing(raised: Raised) -> str:
    found = _MISSING.search(f"{raised.kind}: {raised.text}")
    return next((group for group in found.groups() if group), "") if found else ""


__all__ = ["TORCH", "Diagnosis", "diagnose", "diagnose_checks", "diagnose_raised", "diagnose_receipt", "may_follow"]
