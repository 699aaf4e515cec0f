"""What the loss gate says of recipes, of a session or of a folder of curves, in sentences."""

from __future__ import annotations

from typing import assert_never

from megacpp_validate.evidence.receipt import Check, Outcome

from ...environments.session_result import SessionResult
from ...gate.fp8_session import Fp8Result
from ...gate.loss_result import LossGateResult, LossOutcome, LossVerdict
from ..marks import Mark, mark_cell
from ..summaries import count


def mark_loss(verdict: LossVerdict) -> Mark:
    """How a verdict is shown; curves that cannot be compared are evidence that is missing."""
    match verdict.outcome:
        case LossOutcome.PASS:
            return mark_cell(Outcome.PASS)
        case LossOutcome.FAIL:
            return mark_cell(Outcome.FAIL)
        case LossOutcome.REFUSED:
            return mark_cell(Outcome.NOT_RUN)
        case _:
            assert_never(verdict.outcome)


def name_loss(verdict: LossVerdict) -> str:
    """The cell and the recipe of a verdict."""
    return f"{verdict.of} {verdict.recipe or 'no recipe'}".strip()


def summarize_losses(result: LossGateResult) -> str:
    """The answer in one sentence."""
    if not result.verdicts:
        return "There is no curve: nothing is known of any recipe."
    parts = []
    for outcome, words in ((LossOutcome.FAIL, "does not follow BF16"), (LossOutcome.REFUSED, "cannot be compared")):
        parts += [f"{name_loss(verdict)} {words}" for verdict in result.verdicts if verdict.outcome is outcome]
    return f"{'; '.join(parts)}." if parts else f"{count(len(result.verdicts), 'recipe')} of FP8: all follow BF16."


def find_losses(result: SessionResult) -> tuple[LossVerdict, ...]:
    """The verdicts of a session; none but of a session of FP8."""
    return result.loss if isinstance(result, Fp8Result) else ()


def find_red_losses(result: SessionResult) -> list[str]:
    """What of the loss gate is not good, for the answer of the session; empty where all is."""
    if not isinstance(result, Fp8Result):
        return []
    bad = [verdict.recipe or "no recipe" for verdict in result.loss if verdict.outcome is LossOutcome.FAIL]
    unknown = [verdict.recipe or "no recipe" for verdict in result.loss if verdict.outcome is LossOutcome.REFUSED]
    said = [f"the loss gate fails {', '.join(bad)}"] if bad else []
    said += [f"the loss gate cannot compare {', '.join(unknown)}"] if unknown else []
    said += [f"no verdict on the loss: {result.loss_missing}"] if result.loss_missing else []
    return said


def say_loss_missing(result: SessionResult) -> str:
    """Why a session that trained has no verdict; empty where it has one, or did not train."""
    return result.loss_missing if isinstance(result, Fp8Result) else ""


def say_loss(verdict: LossVerdict) -> str:
    """The answer on one recipe in one sentence."""
    name = verdict.recipe or "a recipe without a name"
    match verdict.outcome:
        case LossOutcome.PASS:
            return f"{name} follows BF16: {_say_gap(verdict)}"
        case LossOutcome.FAIL:
            failed = [check.name for check in verdict.checks if not check.passed]
            return f"{name} does not follow BF16: {', '.join(failed)} out of bounds"
        case LossOutcome.REFUSED:
            return f"{name} cannot be compared with BF16: {'; '.join(verdict.refusals)}"
        case _:
            assert_never(verdict.outcome)


def find_failed_losses(verdict: LossVerdict) -> tuple[Check, ...]:
    """Checks of a verdict that did not pass."""
    return tuple(check for check in verdict.checks if not check.passed)


def _say_gap(verdict: LossVerdict) -> str:
    gaps = [abs(gap) for each in verdict.series for gap in each.gap[len(each.gap) // 2 :]]
    seeds = len(verdict.series)
    if not gaps or verdict.bar is None or verdict.spread is None:
        return "every check is within its bound"
    return (
        f"the smoothed gap of {seeds} seeds is {max(gaps):.4f} nats at most over the second half, bar "
        f"{verdict.bar:.4f}; the seeds of BF16 spread by {verdict.spread:.4f}"
    )
