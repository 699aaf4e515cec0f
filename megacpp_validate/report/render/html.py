"""A document as one page that works from disk: no server, no network, no script; narrow screens and print count."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from html import escape
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from megacpp_validate.text import clean, clean_line

from .. import document as doc
from ..document import Document, Link
from ..marks import Mark
from .blocks import Format

# Where a long path or name may be broken: after a separator.
_BREAK: Final = re.compile(r"(?<=[/.])(?=[^/.\s\d])|(?<=[A-Za-z0-9]_)(?=[A-Za-z0-9])")
_ELSEWHERE: Final = re.compile(r"(?!https?:)[A-Za-z][A-Za-z0-9+.-]*:")  # a scheme that a page must not lead to
_WIDE: Final = 4  # columns from which a table may need to scroll on a telephone


def render_html(document: Document) -> str:
    """The document as one page."""
    return render_page(document)


def render_page(document: Document, *, links: tuple[Link, ...] = (), here: str = "") -> str:
    """A page: the document below the links to the other pages of its site.

    Args:
        links: to other pages; none for a page that stands alone.
        here: target of the link to this page.
    """
    form = _Html()
    page = _read_template().render(
        document=document,
        body="\n".join(map(form.block, document.blocks)),
        answer=_sentence(document.summary),
        title=_sentence(document.title),
        plain_title=clean_line(document.title.replace("`", "")),
        links=[(form.link(link), link.target == here) for link in links],
    )
    return _COMMAND.sub(lambda found: "&#35;" if found[2] else f"{found[1]}&#58;", page)


# What GitHub's log takes for a command, where a page goes to standard output.
_COMMAND: Final = re.compile(r"(?m)^(\s*):(?=:[a-z])|(#)(?=#\[)")


@cache
def _read_template() -> Template:
    environment = Environment(
        loader=PackageLoader("megacpp_validate.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("page.html.j2")


def make_anchor(text: str) -> str:
    """The id of a heading, for links to it."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "section"


class _Html(Format):
    """Each method returns HTML, and escapes every text that it shows."""

    line_end = "<br>"

    def text(self, text: str) -> str:
        """Foreign text, escaped."""
        return _sentence(text)

    def symbol(self, mark: Mark | None) -> str:
        """The symbol of a mark."""
        return f'<span aria-hidden="true">{escape(mark.symbol)}</span> ' if mark is not None else ""

    def badge(self, mark: Mark) -> str:
        """A mark with its word."""
        return f'<span class="badge {mark.tone}">{self.symbol(mark)}{_plain(mark.word)}</span>'

    def place(self, place: doc.Place) -> str:
        """A place in a file."""
        return f"<code>{_breakable(clean_line(str(place)))}</code>"

    def link(self, link: Link) -> str:
        """A link."""
        text = f"{self.symbol(link.mark)}{_sentence(link.text)}"
        if _ELSEWHERE.match(link.target):
            return text
        tone = f' class="{link.mark.tone}"' if link.mark else ""
        return f'<a href="{escape(clean_line(link.target))}"{tone}>{text}</a>'

    def heading(self, block: doc.Heading) -> str:
        """A heading."""
        tag = f"h{min(max(block.level, 2), 6)}"
        return f'<{tag} id="{make_anchor(block.text)}">{self.symbol(block.mark)}{_sentence(block.text)}</{tag}>'

    def paragraph(self, block: doc.Paragraph) -> str:
        """A paragraph."""
        tone = f' class="note {block.mark.tone}"' if block.mark else ""
        return f"<p{tone}>{self.symbol(block.mark)}{_sentence(block.text)}</p>"

    def bullets(self, block: doc.Bullets) -> str:
        """A list."""
        return f"<ul>{''.join(f'<li>{_sentence(item)}</li>' for item in block.items)}</ul>"

    def preformatted(self, block: doc.Preformatted) -> str:
        """Text as it is."""
        return f"<pre>{_plain(block.text)}</pre>"

    def figure(self, block: doc.Figure) -> str:
        # Our own drawing, which escapes what it shows.
        """A drawing."""
        return f'<figure role="img" aria-label="{escape(clean_line(block.alternative))}">{clean(block.svg)}</figure>'

    def details(self, block: doc.Details) -> str:
        """Blocks that are folded."""
        summary, inner = (
            f"{self.symbol(block.mark)}{_sentence(block.summary)}",
            "\n".join(map(self.block, block.blocks)),
        )
        return f"<details><summary>{summary}</summary>\n{inner}\n</details>"

    def diagnostic(self, block: doc.Diagnostic) -> str:
        """One case: its mark, its message and its fields."""
        rows = [
            f"<div><dt>{_plain(label)}</dt><dd>{self.content(content)}</dd></div>"
            for label, content in block.list_fields()
        ]
        if block.help:
            rows.append(f'<div class="next"><dt>next</dt><dd>{_sentence(block.help)}</dd></div>')
        code = f' <span class="code">{_plain(block.code)}</span>' if block.code else ""
        message = f"<p>{_sentence(block.message)}</p>" if block.message else ""
        output = self.details(doc.Details("output", (doc.Preformatted(block.output),))) if block.output else ""
        heading = f"<h3>{self.badge(block.mark)} {_sentence(block.name)}{code}</h3>"
        return (
            f'<article class="finding {block.mark.tone}">{heading}{message}<dl>{"".join(rows)}</dl>{output}</article>'
        )

    def table(self, block: doc.Table) -> str:
        """A table."""
        classes = [' class="number"' if at in block.numeric else "" for at in range(len(block.columns))]
        heads = "".join(f"<th{css}>{_sentence(name)}</th>" for css, name in zip(classes, block.columns, strict=True))
        rows = (
            f"<tr>{''.join(f'<td{css}>{self.content(cell)}</td>' for css, cell in zip(classes, row, strict=True))}</tr>"
            for row in block.rows
        )
        caption = f"<caption>{_sentence(block.caption)}</caption>" if block.caption else ""
        hint = '<p class="hint">This table scrolls sideways.</p>' if len(block.columns) >= _WIDE else ""
        return (
            f'{hint}<div class="scroll" tabindex="0"><table>{caption}<thead><tr>{heads}</tr></thead>'
            f"<tbody>{chr(10).join(rows)}</tbody></table></div>"
        )


def _plain(text: str) -> str:
    return escape(clean(text).rstrip("\n"))


@lru_cache(4096)  # the same bounds and derivations stand in thousands of rows
def _sentence(text: str) -> str:
    """A sentence: escaped, and what stands between backticks as code."""
    pieces = map(_breakable, re.split(r"`([^`]*)`", clean_line(text)))
    return "".join(f"<code>{piece}</code>" if odd % 2 else piece for odd, piece in enumerate(pieces))


def _breakable(text: str) -> str:
    """Text whose paths may be broken after a separator, and are copied without the breaks."""
    return "<wbr>".join(map(escape, _BREAK.split(text)))
