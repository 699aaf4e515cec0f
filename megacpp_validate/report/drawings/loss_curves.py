"""Loss curves and their gap as one SVG: ink of the page only, lines told apart by dashes and by a name at their end."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final, NamedTuple

from megacpp_validate.evidence.receipt import Check

from ...gate.loss_result import LossOutcome, LossVerdict

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_WIDTH: Final = 900
_LEFT, _RIGHT = 70, 800
_POINTS: Final = 300  # of one line: more than that is not seen, and makes a heavy page
_DASHES: Final = ("", "7 3", "2 2", "10 3 2 3", "1 3", "12 4")
_WORDS: Final = {
    LossOutcome.PASS: "✓ pass: every check is within its bound",
    LossOutcome.FAIL: "✗ fail",
    LossOutcome.REFUSED: "○ refused: the curves cannot be compared, nothing is known of this recipe",
}
_LINE: Final = 20
_MOST_LINES: Final = 12


class _Panel(NamedTuple):
    """Where a panel stands, and which values it shows; steps run from `first` to `last`."""

    top: float
    bottom: float
    first: int
    last: int
    low: float
    high: float

    def x(self, step: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (step - self.first) / max(self.last - self.first, 1)

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * (value - self.low) / (self.high - self.low)


def draw_loss_curves(verdict: LossVerdict) -> str:
    """The verdict on one recipe as an SVG document that also stands alone.

    Top: the answer in words, and each check that failed. Middle: smoothed loss, BF16 solid and FP8 dashed. Bottom: the
    gap of each seed, and the bar over the stretch that it holds for. A curve that is damaged is not drawn.
    """
    words = list(_say_answer(verdict))
    top = 40 + _LINE * len(words)
    parts = [_text(20, 28 + _LINE * line, said, "bold" if line == 0 else "normal") for line, said in enumerate(words)]
    height: float = top
    if verdict.series:
        parts += [*_draw_losses(verdict, top + 20), *_draw_gaps(verdict, top + 290)]
        height = top + 540
    title = f"Loss gate of {_plain(verdict.recipe) or 'no recipe'}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDTH} {height:.0f}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="currentColor">'
        f"<title>{escape(title)}</title><desc>{escape('. '.join(words))}</desc>{''.join(parts)}</svg>\n"
    )


def _say_answer(verdict: LossVerdict) -> Iterator[str]:
    yield f"{_plain(verdict.recipe) or 'no recipe'}: {_WORDS[verdict.outcome]}"
    said = [*map(_plain, verdict.refusals), *(_say_check(check) for check in verdict.checks if not check.passed)]
    yield from said[:_MOST_LINES]
    if len(said) > _MOST_LINES:
        yield f"and {len(said) - _MOST_LINES} more"


def _say_check(check: Check) -> str:
    sizes = "; ".join(
        f"{'not a finite number' if part.observed is None else format(part.observed, '.4g')}, bound {part.bound:.4g}"
        for part in check.parts
        if not part.passed and part.bound
    )
    return _plain(": ".join(filter(None, (check.name, sizes, check.detail))))


def _draw_losses(verdict: LossVerdict, top: float) -> Iterator[str]:
    of_fp8 = [[a + b for a, b in zip(each.reference, each.gap, strict=True)] for each in verdict.series]
    panel = _place(verdict, top, [*(each.reference for each in verdict.series), *of_fp8])
    name = _plain(verdict.recipe)
    yield from _draw_frame(panel, f"smoothed loss, nats: BF16 solid, {name} dashed; one pair a seed")
    for each, fp8 in zip(verdict.series, of_fp8, strict=True):
        yield _line(panel, each.steps, each.reference, "", f"BF16, seed {each.seed}")
        yield _line(panel, each.steps, fp8, "6 4", f"{name}, seed {each.seed}")


def _draw_gaps(verdict: LossVerdict, top: float) -> Iterator[str]:
    steps = verdict.series[0].steps
    split = min((steps[-1] + 1) // 2, len(steps) - 1)  # the windows from here on lie in the second half
    bars = [(verdict.early_bar, steps[0], steps[max(split - 1, 0)]), (verdict.bar, steps[split], steps[-1])]
    shown = [(bar, first, last) for bar, first, last in bars if bar is not None and math.isfinite(bar)]
    most = max((bar for bar, _, _ in shown), default=0.0)
    panel = _place(verdict, top, [*(each.gap for each in verdict.series), (most, -most)])
    yield from _draw_frame(panel, f"gap, nats: smoothed loss of {_plain(verdict.recipe)} minus BF16, the same seed")
    yield _line(panel, (panel.first, panel.last), (0.0, 0.0), "", "no gap", width=0.5)
    for bar, first, last in shown:
        for side in (bar, -bar):
            yield _line(panel, (first, last), (side, side), "", f"bar {side:+.4f}", width=2.5)
        beside = -5 if bar == most else 15  # the widest bar stands at the frame
        yield _text(panel.x(first) + 4, panel.y(-bar) + beside, f"bar ±{bar:.4f}, from step {first}", "bold")
    spots = _spread_labels([panel.y(_last_finite(each.gap)) for each in verdict.series])
    for number, (each, spot) in enumerate(zip(verdict.series, spots, strict=True)):
        yield _line(panel, each.steps, each.gap, _DASHES[number % len(_DASHES)], f"gap, seed {each.seed}")
        yield _text(_RIGHT + 6, spot + 4, f"seed {each.seed}")


def _place(verdict: LossVerdict, top: float, shown: Sequence[Sequence[float]]) -> _Panel:
    finite = [value for values in shown for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    margin = (high / 2 - low / 2) * 0.1 or abs(high) * 0.1 or 1.0
    steps = [step for each in verdict.series for step in (each.steps[0], each.steps[-1])]
    return _Panel(top + 25, top + 215, min(steps), max(steps), low - margin, high + margin)


def _draw_frame(panel: _Panel, said: str) -> Iterator[str]:
    yield _text(_LEFT, panel.top - 8, said, "bold")
    yield (
        f'<rect x="{_LEFT}" y="{panel.top:.1f}" width="{_RIGHT - _LEFT}" height="{panel.bottom - panel.top:.1f}" '
        'fill="none" stroke="currentColor" stroke-width="0.5"/>'
    )
    for value in (panel.low, (panel.low + panel.high) / 2, panel.high):
        yield _text(_LEFT - 6, panel.y(value) + 4, f"{value:.4g}", anchor="end")
    for step in (panel.first, (panel.first + panel.last) // 2, panel.last):
        yield _text(panel.x(step), panel.bottom + 16, f"step {step}", anchor="middle")


def _line(
    panel: _Panel, steps: Sequence[int], values: Sequence[float], dash: str, name: str, *, width: float = 1.3
) -> str:
    points = " ".join(f"{panel.x(step):.1f},{panel.y(value):.1f}" for step, value in _thin(steps, values))
    pattern = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="{width}"{pattern}>'
        f"<title>{escape(name)}</title></polyline>"
    )


def _thin(steps: Sequence[int], values: Sequence[float]) -> list[tuple[int, float]]:
    """Of as many points as there is room for, the one farthest from zero: a peak is never thinned away."""
    pairs = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    stride = max(1, math.ceil(len(pairs) / _POINTS))
    buckets = (pairs[start : start + stride] for start in range(0, len(pairs), stride))
    return [max(bucket, key=lambda pair: abs(pair[1])) for bucket in buckets]


def _last_finite(values: Sequence[float]) -> float:
    return next((value for value in reversed(values) if math.isfinite(value)), 0.0)


def _spread_labels(places: list[float]) -> list[float]:
    """Places of labels, a line apart at least."""
    spread = list(places)
    below = -math.inf
    for index in sorted(range(len(places)), key=places.__getitem__):
        below = spread[index] = max(places[index], below + 14)
    return spread


def _text(x: float, y: float, said: str, weight: str = "normal", *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-weight="{weight}" text-anchor="{anchor}">{escape(said)}</text>'


def _plain(text: str) -> str:
    return _CONTROL.sub("", text)
