"""The templates of documents: markup stands in `report/templates`, and every value in it is cleaned and escaped."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from megacpp_validate.text import clean, clean_line

from ..document import list_content

# As references, which no Markdown parser reads as syntax; `_` and `.` inside a word are safe as they are.
_SYNTAX: Final = re.compile(
    r"""[&<>"'`*|\\\[\]#~$!@]|(?<![A-Za-z0-9_])_|_(?![A-Za-z0-9_])|:(?=//)|^[-+=](?=[\s\-=])|(?<=^\d)[.)](?=\s)"""
)


@cache
def read_template(name: str) -> Template:
    """A template of `report/templates`, which escapes every value: for Markdown in its filters."""
    environment = Environment(
        loader=PackageLoader("megacpp_validate.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, undefined=StrictUndefined,
    )  # fmt: skip
    environment.filters |= {
        "clean": clean,
        "code": partial(_mark_code, escape_text=escape),
        "escaped": _escape_markdown,
        "kind": lambda one: type(one).__name__.lower(),
        "line": clean_line,
        "listed": list_content,
        "text": partial(_mark_code, escape_text=_escape_markdown),
    }
    return environment.get_template(name)


def _mark_code(sentence: str, escape_text: Callable[[str], Markup]) -> Markup:
    """A sentence on one line, with what stands between backticks as code."""
    pieces = map(escape_text, re.split(r"`([^`]*)`", clean_line(sentence)))
    return Markup().join(Markup("<code>{}</code>").format(one) if odd % 2 else one for odd, one in enumerate(pieces))


def _escape_markdown(text: str) -> Markup:
    """Text that Markdown and HTML take as text."""
    return Markup(_SYNTAX.sub(lambda found: f"&#{ord(found[0])};", text))  # noqa: S704 - it is escaped
