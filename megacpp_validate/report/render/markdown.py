"""A document in Markdown, for the summary of a GitHub run, an issue or a README; foreign text is never syntax."""

from __future__ import annotations

from ..document import Document
from .templates import read_template


def render_markdown(document: Document) -> str:
    """The document with a title of level 2, as it stands in the summary of a run."""
    return read_template("document.md.j2").render(document=document).strip() + "\n"
