"""What the loss gate decided about the FP8 recipes of a folder, in words and curves."""

from __future__ import annotations

from typing import Final

from megacpp_validate.evidence.receipt import Check
from megacpp_validate.text import count

from ...gate.loss_result import LossGateResult, LossOutcome, LossVerdict
from ..document import Block, Details, Diagnostic, Document, Table
from ..drawings.curves import draw_loss_curves
from ..marks import bad, good, missing

MARKS: Final = {LossOutcome.PASS: good("pass"), LossOutcome.FAIL: bad("fail"), LossOutcome.REFUSED: missing("refused")}


def describe_losses(result: LossGateResult) -> Document:
    """Each verdict with what failed and its curves; every check is folded."""
    title = f"Loss gate on {result.folder}"
    if not result.verdicts:
        return Document(title, "The folder has no loss curve, so nothing is known of any recipe.", missing())
    cases = tuple(describe_verdict(one) for one in result.verdicts)
    blocks: list[Block] = []
    for verdict, case in zip(result.verdicts, cases, strict=True):
        blocks.append(case)
        if verdict.series:
            blocks.append(draw_loss_curves(verdict))
        if verdict.checks:
            blocks.append(Details(f"{case.name}: {count(verdict.checks, 'check')}", (_tabulate(verdict.checks),)))
    failed = [case.name for case in cases if case.mark.tone == "bad"]
    refused = [case.name for case in cases if case.mark.tone == "missing"]
    parts = [f"{name} does not follow BF16" for name in failed] + [f"{name} cannot be compared" for name in refused]
    answer = f"{'; '.join(parts)}." if parts else f"{count(cases, 'FP8 recipe')} checked: all follow BF16."
    mark = bad("closed") if result.breaks else good("open") if result.holds else missing("not comparable")
    return Document(title, answer, mark, tuple(blocks), cases)


def describe_verdict(verdict: LossVerdict) -> Diagnostic:
    """The answer on one recipe."""
    failed = [check for check in verdict.checks if not check.passed]
    name = f"{verdict.of} {verdict.recipe or 'without a recipe'}".strip()
    match verdict.outcome:
        case LossOutcome.REFUSED:
            message = f"The curves cannot be compared with BF16: {'; '.join(verdict.refusals)}."
        case LossOutcome.FAIL:
            message = f"The recipe does not follow BF16: {', '.join(check.name for check in failed)} out of bounds."
        case LossOutcome.PASS:
            gaps = [abs(gap) for each in verdict.series for gap in each.gap[len(each.gap) // 2 :]]
            message = "The recipe follows BF16: every check is within its bound."
            if gaps and verdict.bar is not None:
                message += (
                    f" The smoothed gap is at most {max(gaps):.4f} nats in the second half, bar {verdict.bar:.4f}."
                )
    fields = tuple((check.name, _say_check(check)) for check in failed)
    return Diagnostic(name, MARKS[verdict.outcome], group="loss_gate", message=message, fields=fields)


def _say_check(check: Check) -> str:
    parts = [
        f"{part.name} {_show(part.observed)}, at {'least' if part.at_least else 'most'} {_show(part.bound)} allowed"
        for part in check.parts
        if not part.passed
    ]
    return "; ".join(filter(None, [*parts, check.detail]))


def _tabulate(checks: tuple[Check, ...]) -> Table:
    rows = tuple(
        (
            check.name,
            good("holds") if check.passed else bad("fails"),
            "; ".join(f"{_show(part.observed)} of {_show(part.bound)}" for part in check.parts),
            "; ".join(part.derivation for part in check.parts),
        )
        for check in checks
    )
    return Table(("check", "verdict", "observed of bound", "derivation"), rows, optional=frozenset({3}))


def _show(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
