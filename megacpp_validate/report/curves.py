"""Drawings of training: the loss and the step times of one run, and the curves that the loss gate compares.

A drawing is SVG with the ink of the page only: each line has its own dashes, and its name at its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from megacpp_validate.evidence.receipt import TrainingRecord
from megacpp_validate.text import clean_line

from ..gate.loss import LossVerdict
from .document import Figure

_DASHES: Final = ("", "7 3", "2 2", "10 3 2 3", "1 3", "12 4")
_WIDTH, _LEFT, _RIGHT, _TALL, _GAP = 900, 80, 730, 190, 70
_POINTS: Final = 300  # of one line: a reader sees no more, and the page gets heavy
_LABEL: Final = 14


@dataclass(frozen=True)
class Line:
    """One line of a panel.

    Attributes:
        points: (step, value); a value that is no number is a gap.
        dash: SVG dash pattern; empty for a solid line.
        label: text at the end of the line; empty for none.
    """

    name: str
    points: Sequence[tuple[float, float | None]]
    dash: str = ""
    label: str = ""
    width: float = 1.3


def draw_training(record: TrainingRecord) -> Figure:
    """Loss over steps beside a perfect model's and that of the best model without context; below, seconds a step.

    The first step, which compiles, is not drawn in the times: it would flatten the rest.
    """
    first, last = (record.steps[0].step, record.steps[-1].step) if record.steps else (0, 0)
    losses = [
        Line("loss", [(step.step, step.loss) for step in record.steps], label="loss"),
        Line("perfect model", [(step.step, step.perfect) for step in record.steps], _DASHES[1], "perfect model"),
        _make_level("without context", record.without_context, first, last, _DASHES[2], "without context"),
    ]
    times = [(step.step, step.seconds) for step in record.steps[1:] or record.steps]
    seconds = Line("seconds of each step", times)
    median = _make_level("median", record.step_median, times[0][0] if times else 0, last, _DASHES[1], "median")
    compiling = f"; step {first} took {record.steps[0].seconds:.3g} s" if record.steps else ""
    return draw_panels(
        f"Loss and step times of {record.model} in {record.precision} on {record.ranks} rank(s)",
        {
            f"loss, nats a prediction, over {len(record.steps)} steps": losses,
            f"seconds a step, median {record.step_median:.4g}{compiling}": [seconds, median],
        },
    )


def draw_loss_curves(verdict: LossVerdict) -> Figure:
    """Smoothed loss, BF16 solid and FP8 dashed; below, the gap of each seed and the bars that hold for it."""
    name = verdict.recipe or "no recipe"
    losses, gaps = [], []
    for number, each in enumerate(verdict.series):
        fp8 = [a + b for a, b in zip(each.reference, each.gap, strict=True)]
        losses.append(Line(f"BF16, seed {each.seed}", list(zip(each.steps, each.reference, strict=True))))
        losses.append(Line(f"{name}, seed {each.seed}", list(zip(each.steps, fp8, strict=True)), _DASHES[1]))
        points = list(zip(each.steps, each.gap, strict=True))
        gaps.append(Line(f"gap, seed {each.seed}", points, _DASHES[number % len(_DASHES)], f"seed {each.seed}"))
    for steps in [each.steps for each in verdict.series[:1]]:
        split = min((steps[-1] + 1) // 2, len(steps) - 1)  # the windows from here on lie in the second half
        spans = ((verdict.early_bar, steps[0], steps[max(split - 1, 0)]), (verdict.bar, steps[split], steps[-1]))
        gaps += [
            _make_level(f"bar {side * bar:+.4f}", side * bar, first, last, label="bar" if side > 0 else "", width=2.5)
            for bar, first, last in spans
            for side in (1, -1)
            if bar is not None
        ]
    return draw_panels(
        f"Loss of {name} beside BF16, {len(verdict.series)} seed(s)",
        {
            f"smoothed loss, nats: BF16 solid, {name} dashed; one pair a seed": losses,
            f"gap, nats: {name} minus BF16 of the same seed": gaps,
        },
    )


def _make_level(
    name: str, value: float, first: float, last: float, dash: str = "", label: str = "", width: float = 1.3
) -> Line:
    return Line(name, [(first, value), (last, value)], dash, label, width)


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
    yield _text(_LEFT, top - 10, title, "bold")
    finite = [[(x, y) for x, y in line.points if y is not None and math.isfinite(y)] for line in lines]
    values = [value for points in finite for _, value in points]
    if not values:
        return
    low, high = min(values), max(values)
    margin = (high / 2 - low / 2) * 0.1 or abs(high) * 0.1 or 1.0  # halves: the difference may overflow
    low, high = low - margin, high + margin
    steps = [step for points in finite for step, _ in points]
    first, last = min(steps), max(steps)

    def x(step: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (step - first) / max(last - first, 1)

    def y(value: float) -> float:
        return top + _TALL - _TALL * (value / 2 - low / 2) / (high / 2 - low / 2)

    yield (
        f'<rect x="{_LEFT}" y="{top:.1f}" width="{_RIGHT - _LEFT}" height="{_TALL}" fill="none" '
        'stroke="currentColor" stroke-width="0.5"/>'
    )
    for value in (low, low / 2 + high / 2, high):
        yield _text(_LEFT - 6, y(value) + 4, f"{value:.4g}", anchor="end")
    for step in (first, (first + last) // 2, last):
        yield _text(x(step), top + _TALL + 16, f"step {step:g}", anchor="middle")
    above = -math.inf
    for line, points in sorted(zip(lines, finite, strict=True), key=lambda one: -one[1][-1][1] if one[1] else 0.0):
        thin = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in _thin(points))
        dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
        yield (
            f'<polyline points="{thin}" fill="none" stroke="currentColor" stroke-width="{line.width}"{dash}>'
            f"<title>{escape(clean_line(line.name))}</title></polyline>"
        )
        if line.label and points:
            above = max(y(points[-1][1]), above + _LABEL)  # labels lie a line apart at least
            yield _text(_RIGHT + 8, above + 4, line.label)


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of the points that share a place, the farthest from zero: a peak is never thinned away."""
    stride = max(1, math.ceil(len(points) / _POINTS))
    return [max(points[at : at + stride], key=lambda point: abs(point[1])) for at in range(0, len(points), stride)]


def _text(x: float, y: float, text: str, weight: str = "normal", *, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-weight="{weight}" text-anchor="{anchor}">{escape(clean_line(text))}</text>'
    )
