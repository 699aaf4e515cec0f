"""What is drawn of training: the loss and the step times of one run, and the curves that the loss gate compares."""

from __future__ import annotations

import math

from megacpp_validate.evidence.receipt import TrainingRecord

from ...gate.loss import LossVerdict
from ..document import Figure
from .chart import DASHES, Line, Panel, draw_chart


def draw_training(record: TrainingRecord) -> Figure:
    """Loss over steps beside a perfect model's and that of the best model without context; below, seconds a step.

    The first step, which compiles, is named and not drawn: it would flatten the rest.
    """
    loss = [(step.step, step.loss) for step in record.steps]
    perfect = [(step.step, step.perfect) for step in record.steps]
    lines = [Line("loss", loss, label="loss"), Line("perfect model", perfect, DASHES[1], "perfect model")]
    if record.steps and math.isfinite(record.without_context):
        ends = [(record.steps[at].step, record.without_context) for at in (0, -1)]
        lines.append(Line("without context", ends, DASHES[2], "without context"))
    warm = record.steps[1:] or record.steps
    times = [(step.step, step.seconds) for step in warm]
    median = [(times[at][0], record.step_median) for at in (0, -1)] if times else []
    first = f"; step {record.steps[0].step} took {record.steps[0].seconds:.3g} s" if record.steps[1:] else ""
    title = f"Loss and step times of {record.model} in {record.precision} on {record.ranks} rank(s)"
    panels = (
        Panel(f"loss, nats a prediction, over {len(record.steps)} steps", tuple(lines)),
        Panel(
            f"seconds a step, median {record.step_median:.4g}{first}",
            (Line("seconds of each step", times), Line("median", median, DASHES[1], "median")),
            zero=True,
        ),
    )
    return Figure(draw_chart(title, panels), title)


def draw_loss_curves(verdict: LossVerdict) -> Figure:
    """Smoothed loss, BF16 solid and FP8 dashed; below, the gap of each seed and the bars that hold for it."""
    name = verdict.recipe or "no recipe"
    title = f"Loss of {name} beside BF16, {len(verdict.series)} seed(s)"
    losses, gaps = [], []
    for number, each in enumerate(verdict.series):
        fp8 = [a + b for a, b in zip(each.reference, each.gap, strict=True)]
        losses.append(Line(f"BF16, seed {each.seed}", list(zip(each.steps, each.reference, strict=True))))
        losses.append(Line(f"{name}, seed {each.seed}", list(zip(each.steps, fp8, strict=True)), DASHES[1]))
        points = list(zip(each.steps, each.gap, strict=True))
        gaps.append(Line(f"gap, seed {each.seed}", points, DASHES[number % len(DASHES)], f"seed {each.seed}"))
    if verdict.series:
        steps = verdict.series[0].steps
        split = min((steps[-1] + 1) // 2, len(steps) - 1)  # the windows from here on lie in the second half
        spans = ((verdict.early_bar, steps[0], steps[max(split - 1, 0)]), (verdict.bar, steps[split], steps[-1]))
        for bar, first, last in spans:
            for side in (1, -1):
                if bar is not None and math.isfinite(bar):
                    ends = [(first, side * bar), (last, side * bar)]
                    gaps.append(Line(f"bar {side * bar:+.4f}", ends, label="" if side < 0 else "bar", width=2.5))
    panels = (
        Panel(f"smoothed loss, nats: BF16 solid, {name} dashed; one pair a seed", tuple(losses)),
        Panel(f"gap, nats: {name} minus BF16 of the same seed", tuple(gaps)),
    )
    return Figure(draw_chart(title, panels), title)
