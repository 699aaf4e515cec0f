"""A document as one page that works from disk: no server, no network, no script; narrow screens and print count."""

from __future__ import annotations

from ..document import Document
from .templates import read_template


def render_html(document: Document, *, overview: str = "") -> str:
    """The document as one page.

    Args:
        overview: path of the page that a page of a site leads back to; empty for a page that stands alone.
    """
    return read_template("page.html.j2").render(document=document, overview=overview)
