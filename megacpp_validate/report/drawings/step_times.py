"""Step times and goodput of a training run as one SVG: ink of the page only, each bar with its name beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from typing import Final

from megacpp_validate.evidence.training import TrainingRecord

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_WIDTH: Final = 900
_LEFT, _RIGHT = 150, 800
_TOP, _BOTTOM = 40, 200
_BAR: Final = 22
_POINTS: Final = 300  # of one line: more than that is not seen, and makes a heavy page
_PER_NS: Final = 1e-9


def draw_step_times(record: TrainingRecord) -> str:
    """The step times of a run and the shares of its phases, as an SVG document that also stands alone.

    Top: seconds of each step; the first, which compiles, is told in words, as it would flatten the rest. Bottom: a bar
    a phase, as long as its share of the wall time.
    """
    bars = [(name, ns) for name, ns in record.phases_ns.items() if ns]
    height = _BOTTOM + 70 + _BAR * len(bars)
    title = f"Step times and goodput of {_plain(record.model)} on {record.ranks} rank(s)"
    parts = [*_draw_series(record), *_draw_bars(bars, record.whole_ns, _BOTTOM + 60)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="currentColor">'
        f"<title>{escape(title)}</title><desc>{escape(_describe(record))}</desc>{''.join(parts)}</svg>\n"
    )


def _describe(record: TrainingRecord) -> str:
    spent = ", ".join(f"{name} {ns * _PER_NS:.2f} s" for name, ns in record.phases_ns.items() if ns)
    return f"{len(record.steps)} steps, median {record.step_median:.4g} s. {_plain(spent)}"


def _draw_series(record: TrainingRecord) -> Iterator[str]:
    warm = record.steps[1:] or record.steps
    first = f"; step {record.steps[0].step} took {record.steps[0].seconds:.3g} s" if record.steps[1:] else ""
    yield _text(_LEFT, 24, f"seconds a step, median {record.step_median:.4g}{first}", "bold")
    if not warm:
        return
    low, high = warm[0].step, warm[-1].step
    most = max(step.seconds for step in warm) or 1.0
    yield (
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_RIGHT - _LEFT}" height="{_BOTTOM - _TOP}" fill="none" '
        'stroke="currentColor" stroke-width="0.5"/>'
    )

    def x(step: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (step - low) / max(high - low, 1)

    def y(seconds: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * seconds / (most * 1.05)

    stride = -(-len(warm) // _POINTS)
    # Of the steps that share a point the slowest: a peak is never thinned away.
    shown = [max(warm[at : at + stride], key=lambda step: step.seconds) for at in range(0, len(warm), stride)]
    points = " ".join(f"{x(step.step):.1f},{y(step.seconds):.1f}" for step in shown)
    yield (
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.3">'
        "<title>seconds of each step</title></polyline>"
    )
    yield (
        f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{y(record.step_median):.1f}" y2="{y(record.step_median):.1f}" '
        'stroke="currentColor" stroke-width="0.8" stroke-dasharray="6 4"><title>median</title></line>'
    )
    for value in (0.0, most):
        yield _text(_LEFT - 6, y(value) + 4, f"{value:.3g}", anchor="end")
    for step in (low, high):
        yield _text(x(step), _BOTTOM + 16, f"step {step}", anchor="middle")


def _draw_bars(bars: list[tuple[str, int]], whole: int, top: float) -> Iterator[str]:
    yield _text(_LEFT, top - 8, f"where {whole * _PER_NS:.1f} s went: only the phase step trains", "bold")
    for number, (name, ns) in enumerate(bars):
        share, y = ns / whole if whole else 0.0, top + _BAR * number
        width = (_RIGHT - _LEFT) * share
        filled = "0.75" if name == "step" else "0.25"
        yield _text(_LEFT - 6, y + 14, _plain(name), anchor="end")
        yield (
            f'<rect x="{_LEFT}" y="{y + 2:.1f}" width="{width:.1f}" height="{_BAR - 6}" fill="currentColor" '
            f'fill-opacity="{filled}" stroke="currentColor" stroke-width="0.5"/>'
        )
        yield _text(min(_LEFT + width + 6, _RIGHT + 6), y + 14, f"{ns * _PER_NS:.2f} s, {share:.1%}")


def _text(x: float, y: float, said: str, weight: str = "normal", *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-weight="{weight}" text-anchor="{anchor}">{escape(said)}</text>'


def _plain(text: str) -> str:
    return _CONTROL.sub("", text)
