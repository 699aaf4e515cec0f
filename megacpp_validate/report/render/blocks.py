"""The walk that formats of text share: a block or an inline thing goes to the method that is named like its type."""

from __future__ import annotations

from ..document import Block, Content, Inline, Link, Place, list_content
from ..marks import Mark


class Format:
    """A format in text. A subclass has a method for each type of block, `text`, `symbol`, `badge`, `place`, `link`.

    Attributes:
        line_end: what stands between things that a cell shows one below the other.
    """

    line_end: str

    def block(self, block: Block) -> str:
        """One block."""
        rendered: str = getattr(self, type(block).__name__.lower())(block)
        return rendered

    def content(self, content: Content) -> str:
        """What a table cell or a field holds."""
        return self.line_end.join(map(self.inline, list_content(content)))

    def inline(self, one: Inline) -> str:
        """One thing that a table cell or a field holds."""
        match one:
            case Mark():
                return self.badge(one)
            case Place():
                return self.place(one)
            case Link():
                return self.link(one)
        return self.text(one)

    def text(self, text: str) -> str:
        """A sentence on one line, code between backticks."""
        raise NotImplementedError

    def badge(self, mark: Mark) -> str:
        """A mark with its word."""
        raise NotImplementedError

    def place(self, place: Place) -> str:
        """A line of a file."""
        raise NotImplementedError

    def link(self, link: Link) -> str:
        """A link."""
        raise NotImplementedError
