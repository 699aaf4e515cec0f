"""A document as one page that works from disk: no server, no network, no script; narrow screens and print count."""

from __future__ import annotations

from functools import cache
from html import escape
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from megacpp_validate.text import clean, clean_line

from .. import document as doc
from ..document import Document, Link
from ..marks import Mark
from .blocks import Format

_WIDE: Final = 4  # columns from which a table may need to scroll on a telephone


def render_html(document: Document, *, overview: str = "") -> str:
    """The document as one page.

    Args:
        overview: path of the page that a page of a site leads back to; empty for a page that stands alone.
    """
    form = _Html()
    return _read_template().render(
        document=document,
        body="\n".join(map(form.render, document.blocks)),
        answer=form.text(document.summary),
        title=form.text(document.title),
        plain_title=clean_line(document.title.replace("`", "")),
        overview=overview,
    )


@cache
def _read_template() -> Template:
    loader = PackageLoader("megacpp_validate.report")
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        undefined=StrictUndefined,
    )  # fmt: skip
    return environment.get_template("page.html.j2")


class _Html(Format):
    """Each method returns HTML, and escapes every text that it shows."""

    def escape(self, text: str) -> str:
        """Foreign text, escaped."""
        return escape(text)

    def symbol(self, mark: Mark | None) -> str:
        """The symbol of a mark."""
        return f'<span aria-hidden="true">{escape(mark.symbol)}</span> ' if mark is not None else ""

    def mark(self, mark: Mark) -> str:
        """A mark with its word."""
        return f'<span class="badge {mark.tone}">{self.symbol(mark)}{_plain(mark.word)}</span>'

    def place(self, place: doc.Place) -> str:
        """A place in a file."""
        return f"<code>{_plain(clean_line(str(place)))}</code>"

    def link(self, link: Link) -> str:
        """A link to a page or a file of ours."""
        tone = f' class="{link.mark.tone}"' if link.mark else ""
        text = f"{self.symbol(link.mark)}{self.text(link.text)}"
        return f'<a href="{escape(clean_line(link.target))}"{tone}>{text}</a>'

    def heading(self, block: doc.Heading) -> str:
        """A heading."""
        tag = f"h{block.level}"
        return f"<{tag}>{self.symbol(block.mark)}{self.text(block.text)}</{tag}>"

    def paragraph(self, block: doc.Paragraph) -> str:
        """A paragraph."""
        tone = f' class="note {block.mark.tone}"' if block.mark else ""
        return f"<p{tone}>{self.symbol(block.mark)}{self.text(block.text)}</p>"

    def bullets(self, block: doc.Bullets) -> str:
        """A list."""
        return f"<ul>{''.join(f'<li>{self.text(item)}</li>' for item in block.items)}</ul>"

    def preformatted(self, block: doc.Preformatted) -> str:
        """Text as it is."""
        return f"<pre>{_plain(block.text)}</pre>"

    def figure(self, block: doc.Figure) -> str:
        """A drawing of ours, which escapes what it shows."""
        return f'<figure role="img" aria-label="{escape(clean_line(block.alternative))}">{clean(block.svg)}</figure>'

    def details(self, block: doc.Details) -> str:
        """Blocks that are folded."""
        inner = "\n".join(map(self.render, block.blocks))
        return f"<details><summary>{self.text(block.summary)}</summary>\n{inner}\n</details>"

    def diagnostic(self, block: doc.Diagnostic) -> str:
        """One case: its mark, its message and its fields."""
        rows = [f"<div><dt>{_plain(name)}</dt><dd>{self.content(one)}</dd></div>" for name, one in block.list_fields()]
        if block.help:
            rows.append(f'<div class="next"><dt>next</dt><dd>{self.text(block.help)}</dd></div>')
        code = f' <span class="code">{_plain(block.code)}</span>' if block.code else ""
        message = f"<p>{self.text(block.message)}</p>" if block.message else ""
        output = self.details(doc.Details("output", (doc.Preformatted(block.output),))) if block.output else ""
        heading = f"<h3>{self.mark(block.mark)} {self.text(block.name)}{code}</h3>"
        body = f"{heading}{message}<dl>{''.join(rows)}</dl>{output}"
        return f'<article class="finding {block.mark.tone}">{body}</article>'

    def table(self, block: doc.Table) -> str:
        """A table."""
        classes = [' class="number"' if at in block.numeric else "" for at in range(len(block.columns))]
        heads = "".join(f"<th{css}>{self.text(name)}</th>" for css, name in zip(classes, block.columns, strict=True))
        rows = (
            f"<tr>{''.join(f'<td{css}>{self.content(cell)}</td>' for css, cell in zip(classes, row, strict=True))}</tr>"
            for row in block.rows
        )
        caption = f"<caption>{self.text(block.caption)}</caption>" if block.caption else ""
        hint = '<p class="hint">This table scrolls sideways.</p>' if len(block.columns) >= _WIDE else ""
        body = f"<thead><tr>{heads}</tr></thead><tbody>{chr(10).join(rows)}</tbody>"
        return f'{hint}<div class="scroll" tabindex="0"><table>{caption}{body}</table></div>'


def _plain(text: str) -> str:
    return escape(clean(text).rstrip("\n"))
