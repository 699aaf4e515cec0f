"""The words of a session: what a receipt says, in sentences."""

from __future__ import annotations

import math
from typing import Final, NamedTuple, assert_never

from megacpp_validate.evidence.receipt import Backend, Check, Machine, Outcome, Part, Receipt

from ...environments.session_result import SessionResult, SmokeSession, SupportGrid, SupportRow
from ...gate.fp8_session import Fp8Result
from ..describe.firewall import split_reason
from ..marks import mark_cell
from ..summaries import count, first_sentence
from .loss import find_red_losses

# This part of a comparison says how tight the bound is, not how far the tensor is off.
_OF_THE_BOUND: Final = "bound-discriminates"


class Worst(NamedTuple):
    """The check that came closest to its bound, or went furthest over it."""

    ratio: float
    check: str
    part: str


def find_worst(receipt: Receipt) -> Worst | None:
    """The largest observed / bound of all parts; None where nothing was measured against a bound."""
    found = [
        Worst(_ratio(part), check.name, part.name)
        for check in receipt.checks
        for part in check.parts
        if part.name != _OF_THE_BOUND
    ]
    return max(found, key=lambda worst: worst.ratio, default=None)


def say_worst(receipt: Receipt) -> str:
    """The largest observed / bound as a number; empty where there is none."""
    worst = find_worst(receipt)
    return "" if worst is None else f"{worst.ratio:.2f}" if math.isfinite(worst.ratio) else "inf"


def say_checks(receipt: Receipt) -> str:
    """Checks that passed, of how many."""
    return f"{sum(check.passed for check in receipt.checks)}/{len(receipt.checks)}" if receipt.checks else ""


def say_backends(receipt: Receipt) -> str:
    """What was requested, and everything that was seen to run instead or below it."""
    seen = sorted({name for backend in receipt.backends for name in backend.observed})
    return f"{receipt.requested}: {', '.join(seen)}" if seen else receipt.requested


def find_failed(receipt: Receipt) -> tuple[Check, ...]:
    """Checks that did not pass."""
    return tuple(check for check in receipt.checks if not check.passed)


def find_fallbacks(receipt: Receipt) -> tuple[Backend, ...]:
    """Paths that took something else than what was requested; of native paths, those that a check says so of."""
    failed = tuple(check.name for check in find_failed(receipt))
    return tuple(
        backend
        for backend in receipt.backends
        if (receipt.requested != "native" and backend.requested != backend.claimed)
        or any(name.endswith(f"{backend.path}.backend") for name in failed)
    )


def say_fallback(backend: Backend) -> str:
    """One path that fell back, with every reason."""
    seen = f", seen {', '.join(backend.observed)}" if backend.observed else ""
    reasons = "; ".join(backend.reasons) or "no reason was recorded"
    return f"{backend.path}: requested {backend.requested}, took {backend.claimed or 'nothing'}{seen}. {reasons}"


def say_next_step(receipt: Receipt) -> str:
    """What to do about a cell that is not good; empty where it is."""
    match receipt.outcome:
        case Outcome.PASS | Outcome.EXPECTED_UNSUPPORTED:
            return ""
        case Outcome.FAIL:
            return _next_step_of_failure(receipt)
        case Outcome.ERROR:
            where = receipt.failure.frame if receipt.failure and receipt.failure.frame else "the traceback"
            return f"look at {where}; the whole of it is in {receipt.cell}.json, what was printed in {receipt.cell}.log"
        case Outcome.IMPORT_ERROR:
            return split_reason(receipt.reason)[1] or f"import it by hand; what was printed is in {receipt.cell}.log"
        case Outcome.BLOCKED:
            return f"mend {receipt.blocked_by} first"
        case Outcome.TIMEOUT:
            return "look at where it hung; where it is merely slow, raise --limit"
        case Outcome.NOT_RUN:
            return split_reason(receipt.reason)[1] or "run it on the target"
        case _:
            assert_never(receipt.outcome)


def say_cause(receipt: Receipt) -> str:
    """Why a cell is not good, without the next step."""
    return receipt.reason.partition(" Next step:")[0]


def say_machine(machine: Machine) -> str:
    """Where it ran, in one line."""
    gpu = f"{machine.gpu} (compute capability {machine.capability})" if machine.gpu else ""
    parts = (
        gpu,
        machine.driver and f"driver {machine.driver}",
        machine.cuda and f"CUDA {machine.cuda}",
        machine.torch and f"torch {machine.torch}",
        machine.python and f"Python {machine.python}",
    )
    return ", ".join(filter(None, parts)) or "no machine: nothing ran"


def find_machine(result: SessionResult) -> Machine:
    """The machine of a session, from any probe that lived to tell it."""
    return next((receipt.machine for receipt in result.receipts if receipt.machine.python), Machine())


def find_doubles(result: SessionResult) -> tuple[str, ...]:
    """Packages and libraries of which a process saw more than one copy."""
    told: dict[str, None] = {}
    for receipt in result.receipts:
        for library in receipt.libraries:
            if len(library.files) > 1:
                told.setdefault(f"{library.name} is mapped twice: {', '.join(library.files)}")
        for package in receipt.packages:
            if package.other_copies:
                copies = ", ".join(package.other_copies)
                told.setdefault(f"{package.name} is loaded from {package.file}; also there: {copies}")
    return tuple(told)


def say_subject(result: SessionResult) -> str:
    """What a session is about, in a word."""
    if isinstance(result, SmokeSession):
        return "MoE smoke"
    return "FP8" if isinstance(result, Fp8Result) else "Parity"


def say_red_policy(result: SessionResult) -> str:
    """What of the policy of low precision closes a session; empty where nothing does."""
    if isinstance(result, Fp8Result) and result.policy is not None and not result.policy.holds:
        return "the policy of low precision and its presets disagree (`fp8-policy` says where)"
    return ""


def summarize_session(result: SessionResult) -> str:
    """The answer in one sentence."""
    if not result.receipts:
        return "No probe was selected: nothing is known."
    by_outcome = {
        outcome: [receipt.probe for receipt in result.receipts if receipt.outcome is outcome] for outcome in Outcome
    }
    if result.holds:
        lacking = by_outcome[Outcome.EXPECTED_UNSUPPORTED]
        held = count(len(result.receipts) - len(lacking), "probe")
        said = f"{say_subject(result)} holds in {held} of {result.stack} on {result.target}"
        return f"{said}; unsupported there, as expected: {', '.join(lacking)}." if lacking else f"{said}."
    refused = [policy] if (policy := say_red_policy(result)) else []
    if len(by_outcome[Outcome.NOT_RUN]) == len(result.receipts):
        why = first_sentence(say_cause(result.receipts[0])).rstrip(".")
        return f"Nothing ran: {'; '.join([why, *refused])}."
    red = [
        f"{mark_cell(outcome).word} in {', '.join(probes)}"
        for outcome, probes in by_outcome.items()
        if probes and not outcome.is_good
    ]
    red += [*find_red_losses(result), *refused]
    return f"{result.stack} on {result.target}: {'; '.join(red)}."


def summarize_support(grid: SupportGrid) -> str:
    """The answer in one sentence."""
    if not grid.rows:
        return "There is no receipt: nothing is known."
    whole = [row.stack for row in grid.rows if all(cell.outcome.is_good for cell in row.cells)]
    unread = f"; {count(len(grid.unreadable), 'file')} could not be read" if grid.unreadable else ""
    return f"{len(whole)} of {count(len(grid.rows), 'stack')} hold in every module{unread}."


def say_where(row: SupportRow) -> str:
    """On which machine and when a row of the grid was seen."""
    return f"{say_machine(row.machine)}, {row.started[:10] or 'date not known'}"


_VERBS: Final = {"fp8_": ("fp8", "--probes"), "smoke_": ("moe-smoke", "--cells")}  # how a cell is run again


def _next_step_of_failure(receipt: Receipt) -> str:
    verb, cells = next(
        (found for start, found in _VERBS.items() if receipt.probe.startswith(start)), ("parity", "--probes")
    )
    again = f"{verb} --target {receipt.target} {cells} {receipt.probe} --seed {receipt.seed}"
    if find_fallbacks(receipt):
        return "mend what the reasons name, or turn the feature's flag off where the native path is wanted"
    if receipt.requested == "te" and verb == "parity":
        return (
            f"run `MEGACPP_DISABLE_TE=1 megacpp-validate {again}`: if the native path holds there, the fault lies in "
            f"what {receipt.stack} computes; stay on the last stack whose receipt is good"
        )
    return f"run `megacpp-validate {again} --verbose`: the same seed gives the same numbers; look at that check"


def _ratio(part: Part) -> float:
    if part.observed is None or part.bound is None:
        return 0.0 if part.passed else math.inf
    if part.bound == 0.0:
        return 0.0 if part.observed == 0.0 else math.inf
    if part.at_least:
        return math.inf if part.observed == 0.0 else part.bound / part.observed
    return part.observed / part.bound
