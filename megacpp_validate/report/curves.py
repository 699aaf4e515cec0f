"""Drawings of training: the loss and the step times of one run, and the curves that the loss gate compares.

A drawing is SVG with the ink of the page only: each line has its own dashes, and its name beside the panel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final, NamedTuple

from ..evidence.receipt import TrainingRecord
from ..gate.loss import LossVerdict
from ..text import clean_line
from .document import Figure

_DASHES: Final = ("", "7 3", "2 2", "10 3 2 3", "1 3", "12 4")
_WIDTH, _LEFT, _RIGHT, _TALL, _GAP = 900, 80, 680, 190, 70
_POINTS: Final = 300  # of one line: a reader sees no more, and the page gets heavy


class Line(NamedTuple):
    """One line of a panel: (step, value), where a value that is no number is a gap."""

    name: str
    points: Sequence[tuple[float, float | None]]


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
    body = [
        text
        for number, (name, lines) in enumerate(panels.items())
        for text in _draw_panel(name, lines, number * (_TALL + _GAP) + 36)
    ]
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDTH} {len(panels) * (_TALL + _GAP)}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="currentColor">'
        f"<title>{escape(clean_line(title))}</title>{''.join(body)}</svg>\n"
    )
    return Figure(svg, title)


def _draw_panel(title: str, lines: list[Line], top: float) -> Iterator[str]:
    yield _text(_LEFT, top - 10, title)
    finite = [[(x, y) for x, y in line.points if y is not None and math.isfinite(y)] for line in lines]
    values = [value for points in finite for _, value in points]
    if not values:
        return
    low, high = min(values), max(values)
    margin = (high / 2 - low / 2) * 0.1 or abs(high) * 0.1 or 1.0  # halves: the difference may overflow
    low, high = low - margin, high + margin
    steps = [step for points in finite for step, _ in points]
    first, last = min(steps), max(steps)

    def place(step: float, value: float) -> tuple[float, float]:
        """Where a point lies in the drawing."""
        x = _LEFT + (_RIGHT - _LEFT) * (step - first) / max(last - first, 1)
        return x, top + _TALL - _TALL * (value / 2 - low / 2) / (high / 2 - low / 2)

    ink = 'fill="none" stroke="currentColor"'
    yield f'<rect x="{_LEFT}" y="{top}" width="{_RIGHT - _LEFT}" height="{_TALL}" {ink} stroke-width="0.5"/>'
    for value in (low, high):
        yield _text(_LEFT - 6, place(first, value)[1] + 4, f"{value:.4g}", "end")
    for step in (first, last):
        yield _text(place(step, low)[0], top + _TALL + 16, f"step {step:g}", "middle")
    for number, (line, points) in enumerate(zip(lines, finite, strict=True)):
        drawn = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in _thin(points))
        style = f'{ink} stroke-width="1.3" stroke-dasharray="{_DASHES[number % len(_DASHES)]}"'
        at = top + 10 + 15 * number
        yield f'<polyline points="{drawn}" {style}><title>{escape(clean_line(line.name))}</title></polyline>'
        yield f'<line x1="{_RIGHT + 8}" x2="{_RIGHT + 48}" y1="{at}" y2="{at}" {style}/>'
        yield _text(_RIGHT + 54, at + 4, line.name)


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of the points that share a place, the farthest from zero: a peak is never thinned away."""
    stride = max(1, math.ceil(len(points) / _POINTS))
    return [max(points[at : at + stride], key=lambda point: abs(point[1])) for at in range(0, len(points), stride)]


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(clean_line(text))}</text>'
