"""The loss gate's verdicts as a section of a page: the answer in words first, then the curves, then every check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from megacpp_validate.evidence.receipt import Check

from ..gate.loss_result import LossVerdict
from .drawings.curves import draw_loss_curves
from .plain_text import strip_control
from .summaries import count
from .words.checks import say_parts
from .words.loss import mark_loss, name_loss, say_loss

_SECTION: Final = Markup(
    '<section class="losses" aria-labelledby="loss-gate">\n<h2 id="loss-gate">Loss gate</h2>\n'
    '<p class="note">Each recipe trains the same model on the same data from the same seeds as BF16. Lines differ in '
    "their dashes, and each says its name where it is touched or pointed at.</p>\n{verdicts}</section>\n"
)
_FIGURE: Final = Markup(
    '<figure class="curves {tone}">\n<figcaption><span class="badge {tone}"><span aria-hidden="true">{symbol}</span> '
    '{word}</span> {said}</figcaption>\n<div class="picture" role="group" tabindex="0" aria-label="{label}">\n{svg}'
    "</div>\n{checks}</figure>\n"
)
_CHECKS: Final = Markup(
    '<details class="fold">\n<summary>All {number}</summary>\n<ul class="checks">{rows}</ul>\n</details>\n'
)
_CHECK: Final = Markup("<li>{held}: <b>{name}</b>{lines}</li>")
_MISSING: Final = Markup(
    '<p class="note"><span class="badge risk"><span aria-hidden="true">○</span> not run</span> {why}</p>\n'
)


def draw_loss_section(verdicts: Sequence[LossVerdict], missing: str = "") -> Markup:
    """The section, ready to stand in a page; nothing where there is neither a verdict nor a reason for none.

    Without any style it can be read: the picture then takes the width that there is. `templates/curves.css` keeps its
    letters large on a narrow screen, where it is scrolled sideways, and lets it take the width of the paper in print.

    Args:
        verdicts: one a recipe.
        missing: why there is no verdict, or not every one.
    """
    if not verdicts and not missing:
        return Markup("")
    figures = Markup("").join(_draw_figure(verdict) for verdict in verdicts)
    return _SECTION.format(verdicts=figures + (_MISSING.format(why=strip_control(missing)) if missing else Markup("")))


def _draw_figure(verdict: LossVerdict) -> Markup:
    mark = mark_loss(verdict)
    # The drawing escapes what it shows; its viewBox gives it the width of whatever holds it.
    svg = Markup(draw_loss_curves(verdict).svg)  # noqa: S704
    label = f"Loss curves of {name_loss(verdict)} and of BF16, and the gap between them"
    said = f"{verdict.of}: {say_loss(verdict)}" if verdict.of else say_loss(verdict)
    return _FIGURE.format(
        tone=mark.tone,
        symbol=mark.symbol,
        word=mark.word,
        said=strip_control(said),
        label=strip_control(label),
        svg=svg,
        checks=_draw_checks(verdict.checks),
    )


def _draw_checks(checks: Sequence[Check]) -> Markup:
    if not checks:
        return Markup("")
    rows = Markup("").join(
        _CHECK.format(
            held="held" if check.passed else "out",
            name=strip_control(check.name),
            lines=Markup("").join(
                Markup("<div>{}</div>").format(strip_control(line)) for line in say_parts(check, all_parts=True)
            ),
        )
        for check in checks
    )
    return _CHECKS.format(number=count(len(checks), "check"), rows=rows)
