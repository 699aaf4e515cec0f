"""The walk that formats of text share: a block or an inline thing goes to the method that is named like its type."""

from __future__ import annotations

import re
from typing import Any

from megacpp_validate.text import clean_line

from ..document import Content, list_content


class Format:
    """A format in text, with a method for each type of block and inline thing; `text` is for sentences."""

    def escape(self, text: str) -> str:
        """Foreign text, as the format takes it for text."""
        raise NotImplementedError

    def text(self, text: str) -> str:
        """A sentence on one line: escaped, and what stands between backticks as code."""
        pieces = map(self.escape, re.split(r"`([^`]*)`", clean_line(text)))
        return "".join(f"<code>{piece}</code>" if odd % 2 else piece for odd, piece in enumerate(pieces))

    def render(self, one: Any) -> str:
        """A block, or one thing that a table cell or a field holds."""
        method = "text" if isinstance(one, str) else type(one).__name__.lower()
        rendered: str = getattr(self, method)(one)
        return rendered

    def content(self, content: Content) -> str:
        """What a table cell or a field holds."""
        return "<br>".join(map(self.render, list_content(content)))
