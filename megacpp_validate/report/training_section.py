"""The training runs of a session as a section of a page: the numbers in words, then step times and goodput drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from .drawings.curves import draw_training
from .marks import mark_cell
from .plain_text import strip_control
from .words.smoke import HEADINGS, Trained, say_phases, say_row, say_state

_SECTION: Final = Markup(
    '<section class="losses" aria-labelledby="training">\n<h2 id="training">Training</h2>\n'
    '<p class="note">Wall time of rank 0; memory of the rank that took most. MFU is what the model needs of the peak '
    "of the devices in bf16.</p>\n{figures}</section>\n"
)
_FIGURE: Final = Markup(
    '<figure class="curves {tone}">\n<figcaption><span class="badge {tone}"><span aria-hidden="true">{symbol}</span> '
    '{word}</span> {said}</figcaption>\n<p class="note">{state}</p>\n'
    '<div class="picture" role="group" tabindex="0" aria-label="{label}">\n{svg}</div>\n</figure>\n'
)


def draw_training_section(trained: Sequence[Trained]) -> Markup:
    """The section, ready to stand in a page; nothing where no run ended well."""
    if not trained:
        return Markup("")
    return _SECTION.format(figures=Markup("").join(map(_draw_figure, trained)))


def _draw_figure(trained: Trained) -> Markup:
    mark = mark_cell(trained.receipt.outcome)
    row = dict(zip(HEADINGS, say_row(trained), strict=True))
    cell = row.pop("cell")
    said = f"{cell}: {'; '.join(f'{name} {value}' for name, value in row.items() if value)}"
    svg = Markup(draw_training(trained.record).svg)  # noqa: S704 - the drawing escapes what it shows
    return _FIGURE.format(
        tone=mark.tone,
        symbol=mark.symbol,
        word=mark.word,
        said=strip_control(said),
        state=strip_control(f"{say_phases(trained.record)}. {say_state(trained.record)}"),
        label=strip_control(f"Step times and goodput of {cell}"),
        svg=svg,
    )
