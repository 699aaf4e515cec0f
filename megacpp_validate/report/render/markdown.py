"""A document in Markdown, for the summary of a GitHub run, an issue or a README; foreign text is never syntax."""

from __future__ import annotations

import re
from typing import Any, Final

from megacpp_validate.text import clean, clean_line

from .. import document as doc
from ..document import Content, list_content
from ..marks import Mark

# As references, which no Markdown parser reads as syntax; `_` and `.` inside a word are safe as they are.
_SYNTAX: Final = re.compile(
    r"""[&<>"'`*|\\\[\]#~$!@]|(?<![A-Za-z0-9_])_|_(?![A-Za-z0-9_])|:(?=//)|^[-+=](?=[\s\-=])|(?<=^\d)[.)](?=\s)"""
)


def render_markdown(document: doc.Document) -> str:
    """The document with a title of level 2, as it stands in the summary of a run."""
    form = _Markdown()
    parts = [f"## {form.text(document.title)}", f"**{form.symbol(document.mark)}{form.text(document.summary)}**"]
    return "\n\n".join(filter(None, [*parts, *map(form.render, document.blocks)])) + "\n"


class _Markdown:
    """A method for each type of block and inline thing; `text` is for sentences."""

    def render(self, one: Any) -> str:
        """A block, or one thing that a table cell or a field holds."""
        method = "text" if isinstance(one, str) else type(one).__name__.lower()
        rendered: str = getattr(self, method)(one)
        return rendered

    def content(self, content: Content) -> str:
        """What a table cell or a field holds."""
        return "<br>".join(map(self.render, list_content(content)))

    def text(self, text: str) -> str:
        """A sentence on one line: escaped, and what stands between backticks as code."""
        pieces = map(self.escape, re.split(r"`([^`]*)`", clean_line(text)))
        return "".join(f"<code>{piece}</code>" if odd % 2 else piece for odd, piece in enumerate(pieces))

    def escape(self, text: str) -> str:
        """Text that Markdown and HTML take as text."""
        return _SYNTAX.sub(lambda found: f"&#{ord(found[0])};", text)

    def symbol(self, mark: Mark | None) -> str:
        """The symbol of a mark."""
        return f"{mark.symbol} " if mark is not None else ""

    def mark(self, mark: Mark) -> str:
        """A mark with its word."""
        return f"{self.symbol(mark)}{self.text(mark.word)}"

    def place(self, place: doc.Place) -> str:
        """A place in a file."""
        return f"<code>{self.escape(clean_line(str(place)))}</code>"

    def link(self, link: doc.Link) -> str:
        """The text: pages of ours lie beside no text in Markdown."""
        return f"{self.symbol(link.mark)}{self.text(link.text)}"

    def heading(self, block: doc.Heading) -> str:
        """A heading."""
        return f"{'#' * (block.level + 1)} {self.symbol(block.mark)}{self.text(block.text)}"

    def paragraph(self, block: doc.Paragraph) -> str:
        """A paragraph."""
        return f"{self.symbol(block.mark)}{self.text(block.text)}"

    def bullets(self, block: doc.Bullets) -> str:
        """A list."""
        return "\n".join(f"- {self.text(item)}" for item in block.items)

    def preformatted(self, block: doc.Preformatted) -> str:
        """Text as it is: as HTML, for a fence of backticks ends where the text has a longer one."""
        return f"<pre>{self.escape(clean(block.text)).replace(chr(10), '&#10;')}</pre>"

    def table(self, block: doc.Table) -> str:
        """A table."""
        rules = ("--:" if at in block.numeric else "---" for at in range(len(block.columns)))
        rows = [map(self.text, block.columns), rules, *(map(self.content, row) for row in block.rows)]
        lines = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        return f"**{self.text(block.caption)}**\n\n{lines}" if block.caption else lines

    def diagnostic(self, block: doc.Diagnostic) -> str:
        """One case: its mark, its message and its fields."""
        code = f" ({self.text(block.code)})" if block.code else ""
        items = [f"- {self.text(label)}: {self.content(content)}" for label, content in block.list_fields()]
        items += [f"- **next**: {self.text(block.help)}"] if block.help else []
        head = f"#### {self.symbol(block.mark)}{self.text(block.name)}: {self.text(block.mark.word)}{code}"
        output = self.details(doc.Details("output", (doc.Preformatted(block.output),))) if block.output else ""
        return "\n\n".join(filter(None, [head, self.text(block.message), "\n".join(items), output]))

    def figure(self, block: doc.Figure) -> str:
        """A drawing."""
        return self.text(block.alternative)

    def details(self, block: doc.Details) -> str:
        """Blocks that are folded."""
        inner = "\n\n".join(map(self.render, block.blocks))
        return f"<details><summary>{self.text(block.summary)}</summary>\n\n{inner}\n\n</details>"
