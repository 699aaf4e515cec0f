"""What the loss gate decided about the FP8 recipes of a folder, in words and curves."""

from __future__ import annotations

from megacpp_validate.text import count

from ...gate.loss import LossGateResult, LossOutcome, LossVerdict
from ..curves import draw_loss_curves
from ..document import Block, Details, Diagnostic, Document
from ..marks import mark_exit, mark_of, missing
from .receipt import describe_check, tabulate_checks


def describe_losses(result: LossGateResult) -> Document:
    """Each verdict with what failed and its curves; every check is folded."""
    title = f"Loss gate on {result.folder}"
    cases = tuple(map(describe_verdict, result.verdicts))
    blocks: list[Block] = []
    for verdict, case in zip(result.verdicts, cases, strict=True):
        blocks += [case, draw_loss_curves(verdict)] if verdict.series else [case]
        checks = tabulate_checks(verdict.checks, "")
        blocks.append(Details(f"{case.name}: {count(verdict.checks, 'check')}", (checks,)))
    answers = "; ".join(f"{case.name}: {case.mark.word}" for case in cases)
    answer = f"FP8 recipes beside BF16: {answers or 'none, because the folder has no loss curve'}."
    mark = mark_exit(1 if result.breaks else 0 if result.holds else 4, otherwise="not comparable")
    return Document(title, answer, mark, tuple(blocks), cases)


def describe_verdict(verdict: LossVerdict) -> Diagnostic:
    """The answer on one recipe."""
    is_refused = verdict.outcome is LossOutcome.REFUSED
    gaps = [abs(gap) for each in verdict.series for gap in each.gap[len(each.gap) // 2 :]]
    bar = "" if verdict.bar is None else f", bar {verdict.bar:.4f}"
    return Diagnostic(
        name=f"{verdict.of} {verdict.recipe or 'without a recipe'}".strip(),
        mark=missing("not comparable") if is_refused else mark_of(verdict.outcome),
        group="loss_gate",
        message="; ".join(verdict.refusals),
        fields=(
            ("out", tuple(describe_check(check) for check in verdict.checks if not check.passed)),
            ("gap, second half", f"{max(gaps):.4f} nats{bar}" if gaps else ""),
        ),
    )
