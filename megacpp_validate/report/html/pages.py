"""Pages that work from disk: no server, no network, no assets, readable without a script and in print."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ..marks import mark_cell
from ..plain_text import strip_control
from ..summaries import count, first_sentence
from ..words import checks as check_words
from ..words import upgrade as upgrade_words

_BREAK: Final = re.compile(r"(?<=[/.])(?=[^/.\s])|(?<=[A-Za-z0-9]_)(?=[A-Za-z0-9])")


def render_page(template: str, **values: Any) -> str:
    """A page from a template, free of control characters."""
    page = _environment().get_template(template).render(**values)
    return strip_control(page)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("megacpp_validate.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(sentence=draw_sentence, breakable=draw_breakable)
    for module in (check_words, upgrade_words):
        words = (
            name
            for name in vars(module)
            if name.startswith(("find_", "say_", "summarize_", "mark_change", "mark_loss"))
        )
        environment.globals.update({name: getattr(module, name) for name in words})
    environment.globals.update(
        count=count,
        first_sentence=first_sentence,
        mark_cell=mark_cell,
    )
    return environment


def draw_sentence(text: str) -> Markup:
    """A sentence as HTML: escaped, and what stands between backticks as code."""
    code = Markup("<code>{}</code>")
    pieces = [draw_breakable(piece) for piece in re.split(r"`([^`]*)`", text)]
    return Markup("").join(code.format(text) if odd % 2 else text for odd, text in enumerate(pieces))


def draw_breakable(text: str) -> Markup:
    """Text as HTML whose paths may be broken after a separator, and are copied without the breaks."""
    return Markup("<wbr>").join(escape(part) for part in _BREAK.split(text))
