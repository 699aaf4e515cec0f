"""Lines over steps as one SVG: ink of the page only, so each line has dashes of its own and its name at its end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from megacpp_validate.text import clean_line

DASHES: Final = ("", "7 3", "2 2", "10 3 2 3", "1 3", "12 4")
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


@dataclass(frozen=True)
class Panel:
    """Lines that share their axes.

    Attributes:
        title: what is drawn, with its unit.
        zero: the lowest value shown is 0.
    """

    title: str
    lines: tuple[Line, ...]
    zero: bool = False


def draw_chart(title: str, panels: Sequence[Panel]) -> str:
    """Panels one below the other, as an SVG document that also stands alone."""
    body, top = [], 0.0
    for panel in panels:
        body += list(_draw_panel(panel, top + 36))
        top += _TALL + _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDTH} {max(top, 1):.0f}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="currentColor">'
        f"<title>{escape(clean_line(title))}</title>{''.join(body)}</svg>\n"
    )


def _draw_panel(panel: Panel, top: float) -> Iterator[str]:
    yield _text(_LEFT, top - 10, panel.title, "bold")
    finite = [[(x, y) for x, y in line.points if y is not None and math.isfinite(y)] for line in panel.lines]
    values = [value for points in finite for _, value in points]
    if not values:
        return
    steps = [step for points in finite for step, _ in points]
    low, high = (0.0 if panel.zero else min(values)), max(values)
    margin = (high / 2 - low / 2) * 0.1 or abs(high) * 0.1 or 1.0  # halves: the difference may overflow
    low, high = (low if panel.zero else low - margin), high + margin
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
    named = [at for at, line in enumerate(panel.lines) if line.label and finite[at]]
    ends = dict(zip(named, _spread([y(finite[at][-1][1]) for at in named]), strict=True))
    for at, line in enumerate(panel.lines):
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in _thin(finite[at]))
        dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
        yield (
            f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="{line.width}"{dash}>'
            f"<title>{escape(clean_line(line.name))}</title></polyline>"
        )
        if at in ends:
            yield _text(_RIGHT + 8, ends[at] + 4, line.label)


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of the points that share a place, the farthest from zero: a peak is never thinned away."""
    stride = max(1, math.ceil(len(points) / _POINTS))
    return [max(points[at : at + stride], key=lambda point: abs(point[1])) for at in range(0, len(points), stride)]


def _spread(places: Sequence[float]) -> list[float]:
    """Places of labels, a line apart at least."""
    spread, above = list(places), -math.inf
    for index in sorted(range(len(places)), key=places.__getitem__):
        above = spread[index] = max(places[index], above + _LABEL)
    return spread


def _text(x: float, y: float, text: str, weight: str = "normal", *, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-weight="{weight}" text-anchor="{anchor}">{escape(clean_line(text))}</text>'
    )
