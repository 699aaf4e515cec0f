"""A document as one page that works from disk: no server, no network, no script; narrow screens and print count."""

from __future__ import annotations

import re
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from megacpp_validate.text import clean, clean_line

from ..document import Document, list_content


def render_html(document: Document, *, overview: str = "") -> str:
    """The document as one page.

    Args:
        overview: path of the page that a page of a site leads back to; empty for a page that stands alone.
    """
    return read_template("page.html.j2").render(document=document, overview=overview)


@cache
def read_template(name: str) -> Template:
    """A template of `report/templates`, which escapes every value."""
    loader = PackageLoader("megacpp_validate.report")
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        undefined=StrictUndefined,
    )  # fmt: skip
    environment.filters |= {
        "code": _mark_code,
        "kind": lambda one: type(one).__name__.lower(),
        "line": clean_line,
        "listed": list_content,
        "plain": lambda text: clean(text).rstrip("\n"),
    }
    return environment.get_template(name)


def _mark_code(sentence: str) -> Markup:
    """A sentence on one line, with what stands between backticks as code."""
    pieces = map(escape, re.split(r"`([^`]*)`", clean_line(sentence)))
    return Markup().join(Markup("<code>{}</code>").format(one) if odd % 2 else one for odd, one in enumerate(pieces))
