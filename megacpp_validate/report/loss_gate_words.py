"""What the loss gate says of a whole folder of curves, and of a check with its bound."""

from __future__ import annotations

from megacpp_validate.evidence.loss_gate import LossGateResult, LossOutcome, LossVerdict
from megacpp_validate.evidence.receipt import Check

from .summaries import count


def summarize_losses(result: LossGateResult) -> str:
    """The answer in one sentence."""
    if not result.verdicts:
        return "There is no curve: nothing is known of any recipe."
    parts = []
    for outcome, word in ((LossOutcome.FAIL, "do not follow BF16"), (LossOutcome.REFUSED, "cannot be compared")):
        names = [name_loss(verdict) for verdict in result.verdicts if verdict.outcome is outcome]
        parts += [f"{', '.join(names)} {word}"] if names else []
    return f"{'; '.join(parts)}." if parts else f"{count(len(result.verdicts), 'recipe')} of FP8 follow BF16."


def say_size(check: Check) -> str:
    """A check with what was seen, what was allowed, and why."""
    sizes = "; ".join(
        f"{part.name} {_number(part.observed)}, {'at least' if part.at_least else 'at most'} {_number(part.bound)} "
        f"({part.derivation})"
        for part in check.parts
    )
    return ": ".join(filter(None, (check.name, sizes, check.detail)))


def name_loss(verdict: LossVerdict) -> str:
    """The cell and the recipe of a verdict."""
    return f"{verdict.of} {verdict.recipe or 'no recipe'}".strip()


def _number(value: float | None) -> str:
    return "not a finite number" if value is None else f"{value:.4g}"
