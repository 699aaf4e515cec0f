"""The loss of a training run as one SVG: ink of the page only, each line told by its dashes and the name at its end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from markupsafe import Markup

from megacpp_validate.evidence.training import TrainingRecord

from ..drawings.svg_text import plain_label

_WIDTH, _HEIGHT = 900, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 730, 36, 255
_POINTS: Final = 300  # of one line: more than that is not seen, and makes a heavy page

_Line = tuple[str, str, list[tuple[int, float]]]


def draw_losses(record: TrainingRecord) -> Markup:
    """The loss, what a perfect model scores on the same batches, and what the best model without context would.

    Nats a prediction, over steps. A step whose loss is no number is a gap of the line, and is told in words.
    """
    lines = _lines(record)
    missing = [step.step for step in record.steps if step.loss is None]
    said = f"loss in nats a prediction over {len(record.steps)} steps"
    if missing:
        said += f"; not a number at step {', '.join(map(str, missing[:5]))}{' and more' if missing[5:] else ''}"
    parts = "".join(_draw(lines, said)) if lines else f'<text x="{_LEFT}" y="24">no step has a loss</text>'
    title = f"Loss of {plain_label(record.model)} in {plain_label(record.precision)}"
    return Markup(  # noqa: S704 - what is not a number is escaped
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDTH} {_HEIGHT if lines else 40}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="currentColor">'
        f"<title>{escape(title)}</title><desc>{escape(said)}</desc>{parts}</svg>"
    )


def _lines(record: TrainingRecord) -> list[_Line]:
    """Name, dashes and points of each line; none without a loss."""
    loss = [(step.step, step.loss) for step in record.steps if step.loss is not None]
    if not loss:
        return []
    perfect = [(step.step, step.perfect) for step in record.steps if step.perfect is not None]
    lines: list[_Line] = [("loss", "", loss), ("perfect model", "6 4", perfect)]
    if math.isfinite(record.without_context):
        ends = [(loss[0][0], record.without_context), (loss[-1][0], record.without_context)]
        lines.append(("without context", "2 3", ends))
    return [line for line in lines if line[2]]


def _draw(lines: Sequence[_Line], said: str) -> Iterator[str]:
    values = [value for _, _, points in lines for _, value in points]
    steps = [step for _, _, points in lines for step, _ in points]
    low, high = min(values), max(values)
    margin = (high - low) * 0.06 or 1.0
    low, high = low - margin, high + margin
    first, last = min(steps), max(steps)

    def x(step: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (step - first) / max(last - first, 1)

    def y(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (value - low) / (high - low)

    yield f'<text x="{_LEFT}" y="20" font-weight="bold">{escape(said)}</text>'
    yield f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" stroke="currentColor" stroke-width="0.5"/>'
    for value in (low, (low + high) / 2, high):
        yield f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3f}</text>'
    for step, anchor in ((first, "start"), ((first + last) // 2, "middle"), (last, "end")):
        yield f'<text x="{x(step):.1f}" y="{_BOTTOM + 18}" text-anchor="{anchor}">step {step}</text>'
    ends = _apart([y(points[-1][1]) for _, _, points in lines])
    for (name, dash, points), end in zip(lines, ends, strict=True):
        pattern = f' stroke-dasharray="{dash}"' if dash else ""
        drawn = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in _thin(points))
        yield (
            f'<polyline points="{drawn}" fill="none" stroke="currentColor" stroke-width="1.3"{pattern}>'
            f"<title>{escape(name)}</title></polyline>"
            f'<text x="{_RIGHT + 8}" y="{end + 4:.1f}">{escape(name)} {points[-1][1]:.3f}</text>'
        )


def _thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Of as many points as there is room for, the highest: a peak of the loss is never thinned away."""
    stride = max(1, -(-len(points) // _POINTS))
    return [max(points[at : at + stride], key=lambda point: point[1]) for at in range(0, len(points), stride)]


def _apart(places: list[float]) -> list[float]:
    """Places of names, a line apart at least."""
    spread, above = list(places), -math.inf
    for index in sorted(range(len(places)), key=places.__getitem__):
        above = spread[index] = max(places[index], above + 16)
    return spread
