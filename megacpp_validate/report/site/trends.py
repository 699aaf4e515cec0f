"""What a cell cost from run to run: seconds, step time and memory, as numbers and as one small drawing each."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from operator import attrgetter
from typing import Final

from markupsafe import Markup

from ..drawings.svg_text import plain_label
from .values import CellHistory, SiteRow

_WIDTH, _HEIGHT = 640, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 620, 26, 140
_POINTS: Final = 40  # runs that one drawing shows: the newest ones


@dataclass(frozen=True)
class Quantity:
    """Something that a receipt tells in one number; more of it is worse.

    Attributes:
        id: attribute of `SiteRow`.
        name: for people.
        unit: as it is shown.
        scale: shown = observed x scale.
    """

    id: str
    name: str
    unit: str
    scale: float = 1.0

    def of(self, row: SiteRow) -> float | None:
        """What a row says of it; None where it says nothing."""
        value: float | None = attrgetter(self.id)(row)
        return None if value is None else value * self.scale


QUANTITIES: Final = (
    Quantity("step_seconds", "time of a training step", "ms", 1000.0),
    Quantity("probe_seconds", "time of the probe", "s"),
    Quantity("peak_memory_mib", "peak memory", "MiB"),
)


@dataclass(frozen=True)
class Trend:
    """One quantity of one cell over its runs.

    Attributes:
        points: (run, started, value), the oldest first; runs that did not tell it are left out.
    """

    quantity: Quantity
    points: tuple[tuple[str, str, float], ...]

    @property
    def last(self) -> float:
        """The newest value."""
        return self.points[-1][2]

    @property
    def median_before(self) -> float:
        """Median of all values but the newest."""
        return statistics.median(value for _, _, value in self.points[:-1])

    @property
    def ratio(self) -> float:
        """The newest value over the median before it; 1 where that is 0."""
        before = self.median_before
        return self.last / before if before > 0 else 1.0


def find_trends(cell: CellHistory) -> tuple[Trend, ...]:
    """Quantities that at least two good and whole runs of a cell tell: what a red run cost says nothing.

    Neither does a copy, one that is told in two ways, or one whose place among the others is not known.
    """
    good = [row for row in reversed(cell.rows) if row.outcome.is_good and row.counts and row not in cell.future]
    trends = []
    for quantity in QUANTITIES:
        points = [(row.run, row.started, value) for row in good if (value := quantity.of(row)) is not None]
        if len(points) > 1:
            trends.append(Trend(quantity, tuple(points[-_POINTS:])))
    return tuple(trends)


def say_trend(trend: Trend) -> str:
    """The newest value beside the median of those before."""
    unit = trend.quantity.unit
    return (
        f"{trend.last:,.4g} {unit}, {trend.ratio:.2f} x the median of {len(trend.points) - 1} earlier "
        f"({trend.median_before:,.4g} {unit})"
    )


def draw_trend(trend: Trend) -> Markup:
    """The values as an SVG from zero up: ink of the page only, a ring around the newest, the median dashed."""
    name = plain_label(trend.quantity.name)
    said = f"{name}: {say_trend(trend)}"
    parts = "".join(_draw(trend))
    return Markup(  # noqa: S704 - what is not a number is escaped
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="currentColor">'
        f"<title>{escape(said)}</title>{parts}</svg>"
    )


def _draw(trend: Trend) -> Iterator[str]:
    values = [value for _, _, value in trend.points]
    most = max(values) * 1.08 or 1.0
    xs = _spread(len(values))

    def y(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * value / most

    yield f'<text x="{_LEFT}" y="16" font-weight="bold">{escape(trend.quantity.name)}, {trend.quantity.unit}</text>'
    yield f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" stroke="currentColor" stroke-width="0.5"/>'
    for value in (0.0, max(values)):
        yield f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:,.4g}</text>'
    middle = y(trend.median_before)
    yield (
        f'<path d="M{_LEFT} {middle:.1f}H{_RIGHT}" fill="none" stroke="currentColor" stroke-width="0.8" '
        'stroke-dasharray="6 4"><title>median of the earlier runs</title></path>'
    )
    points = " ".join(f"{x:.1f},{y(value):.1f}" for x, value in zip(xs, values, strict=True))
    yield f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.3"/>'
    for x, (run, started, value) in zip(xs, trend.points, strict=True):
        told = plain_label(f"{started[:16]} {run}: {value:,.4g} {trend.quantity.unit}")
        yield f'<circle cx="{x:.1f}" cy="{y(value):.1f}" r="3"><title>{escape(told)}</title></circle>'
    yield (
        f'<circle cx="{xs[-1]:.1f}" cy="{y(values[-1]):.1f}" r="6.5" fill="none" stroke="currentColor" '
        'stroke-width="1.3"/>'
    )
    for x, point, anchor in ((xs[0], trend.points[0], "start"), (xs[-1], trend.points[-1], "end")):
        yield f'<text x="{x:.1f}" y="{_BOTTOM + 20}" text-anchor="{anchor}">{escape(plain_label(point[1][:10]))}</text>'


def _spread(number: int) -> Sequence[float]:
    """Places of that many points, half a step off the axes."""
    step = (_RIGHT - _LEFT) / number
    return [_LEFT + step * (index + 0.5) for index in range(number)]
