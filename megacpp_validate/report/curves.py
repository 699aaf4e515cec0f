"""Drawings of training: the loss and the step times of one run, and the curves that the loss gate compares.

A drawing is SVG with the ink of the page only: each line has its own dashes, and its name beside the panel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from ..evidence.receipt import TrainingRecord
from ..gate.loss import LossVerdict
from .document import Figure
from .render.templates import read_template

_POINTS: Final = 300  # of one line: a reader sees no more, and the page gets heavy


class Line(NamedTuple):
    """One line of a panel: (step, value), where a value that is no number is a gap."""

    name: str
    points: Sequence[tuple[float, float | None]]


class Panel(NamedTuple):
    """What `figure.svg.j2` draws: named lines of points between 0 and 1, and the ends of both axes."""

    title: str
    lines: list[tuple[str, list[tuple[float, float]]]]
    low: float = 0.0
    high: float = 0.0
    first: float = 0.0
    last: float = 0.0


def draw_training(record: TrainingRecord) -> Figure:
    """Loss over steps beside a perfect model's and that of the best model without context; below, seconds a step.

    The first step, which compiles, is not drawn in the times: it would flatten the rest.
    """
    steps = record.steps
    level = [(step.step, record.without_context) for step in (*steps[:1], *steps[-1:])]
    losses = [
        Line("loss", [(step.step, step.loss) for step in steps]),
        Line("perfect model", [(step.step, step.perfect) for step in steps]),
        Line("without context", level),
    ]
    seconds = Line("seconds of each step", [(step.step, step.seconds) for step in steps[1:]])
    compiling = f"; the first took {steps[0].seconds:.3g} s" if steps else ""
    return draw_panels(
        f"Loss and step times of {record.model} in {record.precision} on {record.ranks} rank(s)",
        {
            f"loss, nats a prediction, over {len(steps)} steps": losses,
            f"seconds a step, median {record.step_median:.4g}{compiling}": [seconds],
        },
    )


def draw_loss_curves(verdict: LossVerdict) -> Figure:
    """Smoothed loss of BF16 and FP8; below, the gap of each seed and the bars that hold for it."""
    name = verdict.recipe or "no recipe"
    losses, gaps = [], []
    for each in verdict.series:
        fp8 = [a + b for a, b in zip(each.reference, each.gap, strict=True)]
        losses.append(Line(f"BF16, seed {each.seed}", list(zip(each.steps, each.reference, strict=True))))
        losses.append(Line(f"{name}, seed {each.seed}", list(zip(each.steps, fp8, strict=True))))
        gaps.append(Line(f"gap, seed {each.seed}", list(zip(each.steps, each.gap, strict=True))))
    for steps in [each.steps for each in verdict.series[:1]]:
        split = min((steps[-1] + 1) // 2, len(steps) - 1)  # the windows from here on lie in the second half
        spans = ((verdict.early_bar, steps[0], steps[max(split - 1, 0)]), (verdict.bar, steps[split], steps[-1]))
        gaps += [
            Line(f"bar {side * bar:+.4f}", [(first, side * bar), (last, side * bar)])
            for bar, first, last in spans
            for side in (1, -1)
            if bar is not None
        ]
    panels = {"smoothed loss, nats": losses, f"gap, nats: {name} minus BF16 of the same seed": gaps}
    return draw_panels(f"Loss of {name} beside BF16, {len(verdict.series)} seed(s)", panels)


def draw_panels(title: str, panels: dict[str, list[Line]]) -> Figure:
    """Panels one below the other, as an SVG document that also stands alone; lines of a panel share its axes."""
    drawn = [_scale(name, lines) for name, lines in panels.items()]
    return Figure(read_template("figure.svg.j2").render(title=title, panels=drawn), title)


def _scale(title: str, lines: list[Line]) -> Panel:
    """A panel whose points lie between 0 and 1; without lines where there is no finite number."""
    finite = [[(x, y) for x, y in line.points if y is not None and math.isfinite(y)] for line in lines]
    values = [value for points in finite for _, value in points]
    if not values:
        return Panel(title, [])
    low, high = min(values), max(values)
    margin = (high / 2 - low / 2) * 0.1 or abs(high) * 0.1 or 1.0  # halves: the difference may overflow
    low, high = low - margin, high + margin
    steps = [step for points in finite for step, _ in points]
    first, last = min(steps), max(steps)
    length, height = max(last - first, 1), high / 2 - low / 2
    scaled = [
        (line.name, [((x - first) / length, (y / 2 - low / 2) / height) for x, y in _thin(points)])
        for line, points in zip(lines, finite, strict=True)
    ]
    return Panel(title, scaled, low, high, first, last)


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of the points that share a place, the farthest from zero: a peak is never thinned away."""
    stride = max(1, math.ceil(len(points) / _POINTS))
    return [max(points[at : at + stride], key=lambda point: abs(point[1])) for at in range(0, len(points), stride)]
