"""One receipt in words: how its outcome looks, why it is not good, what was checked and what to do."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Final

from megacpp_validate.evidence.receipt import Backend, Check, Machine, Outcome, Part, Receipt

from ..document import Diagnostic, Table
from ..marks import bad, good, mark_of

_OF_THE_BOUND: Final = "bound-discriminates"  # this part says how tight the bound is, not how far the tensor is off
_MOST_FAILED: Final = 12  # checks of one cell that are listed by name
# How a cell is run again, by how its probe begins.
_VERBS: Final = {"fp8_": ("fp8", "--probes"), "smoke_": ("moe-smoke", "--cells")}


def describe_receipt(receipt: Receipt, *, group: str = "") -> Diagnostic:
    """One cell: why, the checks that failed, what fell back, the next step; the traceback as output.

    Args:
        group: what the cell belongs to.
    """
    failed = find_failed(receipt)
    frame = f"`{receipt.failure.frame}`" if receipt.failure and receipt.failure.frame else ""
    more = f"{len(failed) - _MOST_FAILED} more failed checks" if failed[_MOST_FAILED:] else ""
    fields = (
        ("raised at", frame),
        ("out", (*map(describe_check, failed[:_MOST_FAILED]), more)),
        ("fell back", tuple(map(describe_fallback, find_fallbacks(receipt)))),
    )
    return Diagnostic(
        name=receipt.probe,
        mark=mark_of(receipt.outcome),
        group=group,
        message=find_cause(receipt),
        fields=fields,
        help=describe_next_step(receipt),
        output=receipt.failure.traceback if receipt.failure else "",
        seconds=receipt.seconds.get("total", 0.0),
    )


def describe_check(check: Check) -> str:
    """A check that failed: the parts that are out of bounds, with what was observed and allowed."""
    parts = (
        f"{part.name} {show_number(part.observed)}, {'at least' if part.at_least else 'bound'} "
        f"{show_number(part.bound)} = {part.derivation}"
        for part in check.parts
        if not part.passed
    )
    return "; ".join(filter(None, (f"`{check.name}`", *parts, check.detail)))


def tabulate_checks(checks: Iterable[Check], caption: str) -> Table:
    """A row a part: check, part, observed, bound, and where the bound comes from."""
    rows = []
    for check in checks:
        for part in check.parts:
            bound = f"{'at least' if part.at_least else 'at most'} {show_number(part.bound)}"
            seen = (part.name, show_number(part.observed), bound, part.derivation)
            rows.append((good("held") if part.passed else bad("out"), f"`{check.name}`", *seen))
        if check.detail or not check.parts:
            rows.append((good("held") if check.passed else bad("out"), f"`{check.name}`", "", check.detail, "", ""))
    return Table(("", "check", "part", "observed", "bound", "where the bound comes from"), tuple(rows), caption)


def show_worst(receipt: Receipt) -> str:
    """The largest observed / bound of all parts; empty where nothing was measured against a bound."""
    ratios = [_ratio(part) for check in receipt.checks for part in check.parts if part.name != _OF_THE_BOUND]
    return f"{max(ratios):.2f}" if ratios else ""


def count_checks(receipt: Receipt) -> str:
    """Checks that passed, of how many."""
    return f"{sum(check.passed for check in receipt.checks)}/{len(receipt.checks)}" if receipt.checks else ""


def describe_backends(receipt: Receipt) -> str:
    """The requested backend, and everything that was seen to run."""
    seen = sorted({name for backend in receipt.backends for name in backend.observed})
    return f"{receipt.requested}: {', '.join(seen)}" if seen else receipt.requested


def find_failed(receipt: Receipt) -> tuple[Check, ...]:
    """Checks that did not pass."""
    return tuple(check for check in receipt.checks if not check.passed)


def find_fallbacks(receipt: Receipt) -> tuple[Backend, ...]:
    """Paths that took something else than what was requested; of native paths, those whose check says so."""
    failed = tuple(check.name for check in find_failed(receipt))
    return tuple(
        backend
        for backend in receipt.backends
        if (receipt.requested != "native" and backend.requested != backend.claimed)
        or any(name.endswith(f"{backend.path}.backend") for name in failed)
    )


def describe_fallback(backend: Backend) -> str:
    """One path that fell back, with every reason."""
    seen = f", seen {', '.join(backend.observed)}" if backend.observed else ""
    reasons = "; ".join(backend.reasons) or "no reason was recorded"
    return f"`{backend.path}`: requested {backend.requested}, took {backend.claimed or 'nothing'}{seen}. {reasons}"


def find_cause(receipt: Receipt) -> str:
    """Why a cell is not good, without the next step."""
    return receipt.reason.partition(" Next step:")[0]


def find_doubles(receipts: Iterable[Receipt]) -> tuple[str, ...]:
    """Packages and libraries of which a process saw more than one copy, each once."""
    found: dict[str, None] = {}
    for receipt in receipts:
        for library in receipt.libraries:
            if len(library.files) > 1:
                found.setdefault(f"{library.name} is loaded from more than one file: {', '.join(library.files)}.")
        for package in receipt.packages:
            if package.other_copies:
                copies = ", ".join(package.other_copies)
                found.setdefault(f"{package.name} is loaded from {package.file}; another copy is at {copies}.")
    return tuple(found)


def list_facts(receipt: Receipt) -> Iterator[tuple[str, str]]:
    """Every fact of a receipt's environment that is known: machine, packages and libraries as loaded, identity."""
    facts = [(f"machine {name}", str(value)) for name, value in vars(receipt.machine).items()]
    for package in receipt.packages:
        facts.append((f"package {package.name}", package.version or "loaded, version unknown"))
        facts.append((f"second copy of {package.name}", ", ".join(package.other_copies)))
    for library in receipt.libraries:
        facts.append((f"library {library.name}", library.version or "loaded, version unknown"))
        facts.append((f"files of {library.name}", ", ".join(library.files)))
    facts += [(f"compiler of {compiler.library}", compiler.mode) for compiler in receipt.compilers]
    identity = ("requested", "image_digest", "lock_hash", "environment", "commit", "tool")
    facts += [(name.replace("_", " "), getattr(receipt, name)) for name in identity]
    return ((name, value) for name, value in facts if value)


def describe_machine(machine: Machine) -> str:
    """Where a cell ran, in one line."""
    gpu = f"{machine.gpu} (compute capability {machine.capability})" if machine.gpu else ""
    named = {"driver": machine.driver, "CUDA": machine.cuda, "torch": machine.torch, "Python": machine.python}
    parts = [gpu, *(f"{name} {value}" for name, value in named.items() if value)]
    return ", ".join(filter(None, parts)) or "no machine: nothing ran"


def describe_next_step(receipt: Receipt) -> str:
    """What to do about a cell that is not good; empty where it is good."""
    named = re.search(r"Next step: (.+?)\.?(?= Found:|$)", " ".join(receipt.reason.split()))
    if named and receipt.outcome in (Outcome.IMPORT_ERROR, Outcome.NOT_RUN):
        return named[1]
    where = receipt.failure.frame if receipt.failure and receipt.failure.frame else "the traceback"
    steps = {
        Outcome.FAIL: _next_step_of_failure(receipt),
        Outcome.ERROR: f"look at {where}; `{receipt.cell}.log` has what was printed",
        Outcome.IMPORT_ERROR: f"import it by hand; `{receipt.cell}.log` has what was printed",
        Outcome.BLOCKED: f"fix `{receipt.blocked_by}` first",
        Outcome.TIMEOUT: "look at where it hung; raise --limit if it is only slow",
        Outcome.NOT_RUN: "run it on the target",
    }
    return steps.get(receipt.outcome, "")


def _next_step_of_failure(receipt: Receipt) -> str:
    if find_fallbacks(receipt):
        return "fix what the reasons name, or turn the feature's flag off where the native path is wanted"
    verb, option = next((found for start, found in _VERBS.items() if receipt.probe.startswith(start)), ("", ""))
    again = f"{verb or 'parity'} --target {receipt.target} {option or '--probes'} {receipt.probe} --seed {receipt.seed}"
    if receipt.requested == "te" and not verb:
        return (
            f"run `MEGACPP_DISABLE_TE=1 megacpp-validate {again}`: if the native path holds there, {receipt.stack} "
            "computes wrong values; stay on the last stack whose receipt is good"
        )
    return f"run `megacpp-validate {again} --verbose`: the same seed gives the same numbers; look at that check"


def _ratio(part: Part) -> float:
    if part.observed is None or part.bound is None:
        return 0.0 if part.passed else math.inf
    over, under = (part.bound, part.observed) if part.at_least else (part.observed, part.bound)
    return over / under if under else (0.0 if over == 0.0 and not part.at_least else math.inf)


def show_number(value: float | None) -> str:
    """A number with four digits."""
    return "not a number" if value is None else f"{value:.4g}"
