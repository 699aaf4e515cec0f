"""A document as one page that works from disk: no server, no network, no script; narrow screens and print count."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from html import escape
from typing import Final, assert_never

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from megacpp_validate.text import clean, clean_line

from ..document import (
    Block,
    Bullets,
    Content,
    Details,
    Diagnostic,
    Document,
    Figure,
    Heading,
    Inline,
    Link,
    Mark,
    Paragraph,
    Place,
    Preformatted,
    Table,
    list_content,
)

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
    page = _read_template().render(
        document=document,
        body=render_blocks(document.blocks),
        answer=_sentence(document.summary),
        title=_sentence(document.title),
        plain_title=clean_line(document.title.replace("`", "")),
        links=[(_link(link), link.target == here) for link in links],
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


def render_blocks(blocks: tuple[Block, ...]) -> str:
    """Blocks one below the other; each function below returns HTML, and escapes every text that it shows."""
    return "\n".join(map(_render, blocks))


def make_anchor(text: str) -> str:
    """The id of a heading, for links to it."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "section"


def _render(block: Block) -> str:
    match block:
        case Heading():
            tag = f"h{min(max(block.level, 2), 6)}"
            return f'<{tag} id="{make_anchor(block.text)}">{_symbol(block.mark)}{_sentence(block.text)}</{tag}>'
        case Paragraph():
            tone = f' class="note {block.mark.tone}"' if block.mark else ""
            return f"<p{tone}>{_symbol(block.mark)}{_sentence(block.text)}</p>"
        case Bullets():
            return f"<ul>{''.join(f'<li>{_sentence(item)}</li>' for item in block.items)}</ul>"
        case Preformatted():
            return f"<pre>{_plain(block.text)}</pre>"
        case Table():
            return _tabulate(block)
        case Diagnostic():
            return _diagnose(block)
        case Figure():  # our own drawing, which escapes what it shows
            return (
                f'<figure role="img" aria-label="{escape(clean_line(block.alternative))}">{clean(block.svg)}</figure>'
            )
        case Details():
            return _fold(f"{_symbol(block.mark)}{_sentence(block.summary)}", render_blocks(block.blocks))
        case _:
            assert_never(block)


def _diagnose(found: Diagnostic) -> str:
    rows = [
        f"<div><dt>{_plain(label)}</dt><dd>{_content(content)}</dd></div>" for label, content in found.list_fields()
    ]
    if found.help:
        rows.append(f'<div class="next"><dt>next</dt><dd>{_sentence(found.help)}</dd></div>')
    code = f' <span class="code">{_plain(found.code)}</span>' if found.code else ""
    message = f"<p>{_sentence(found.message)}</p>" if found.message else ""
    output = _fold("output", f"<pre>{_plain(found.output)}</pre>") if found.output else ""
    return (
        f'<article class="finding {found.mark.tone}"><h3>{_badge(found.mark)} {_sentence(found.name)}{code}</h3>'
        f"{message}<dl>{''.join(rows)}</dl>{output}</article>"
    )


def _tabulate(table: Table) -> str:
    classes = [' class="number"' if at in table.numeric else "" for at in range(len(table.columns))]
    heads = "".join(f"<th{css}>{_sentence(name)}</th>" for css, name in zip(classes, table.columns, strict=True))
    rows = (
        f"<tr>{''.join(f'<td{css}>{_content(cell)}</td>' for css, cell in zip(classes, row, strict=True))}</tr>"
        for row in table.rows
    )
    caption = f"<caption>{_sentence(table.caption)}</caption>" if table.caption else ""
    hint = '<p class="hint">This table scrolls sideways.</p>' if len(table.columns) >= _WIDE else ""
    return (
        f'{hint}<div class="scroll" tabindex="0"><table>{caption}<thead><tr>{heads}</tr></thead>'
        f"<tbody>{chr(10).join(rows)}</tbody></table></div>"
    )


def _fold(summary: str, inner: str) -> str:
    return f"<details><summary>{summary}</summary>\n{inner}\n</details>"


def _content(content: Content) -> str:
    return "<br>".join(map(_inline, list_content(content)))


def _inline(one: Inline) -> str:
    match one:
        case str():
            return _sentence(one)
        case Mark():
            return _badge(one)
        case Place():
            return f"<code>{_breakable(clean_line(str(one)))}</code>"
        case Link():
            return _link(one)
        case _:
            assert_never(one)


def _link(link: Link) -> str:
    text = f"{_symbol(link.mark)}{_sentence(link.text)}"
    if _ELSEWHERE.match(link.target):
        return text
    tone = f' class="{link.mark.tone}"' if link.mark else ""
    return f'<a href="{escape(clean_line(link.target))}"{tone}>{text}</a>'


def _badge(mark: Mark) -> str:
    return f'<span class="badge {mark.tone}">{_symbol(mark)}{_plain(mark.word)}</span>'


def _symbol(mark: Mark | None) -> str:
    return f'<span aria-hidden="true">{escape(mark.symbol)}</span> ' if mark is not None else ""


def _plain(text: str) -> str:
    return escape(clean(text).rstrip("\n"))


@lru_cache(4096)  # the same bounds and derivations stand in thousands of rows
def _sentence(text: str) -> str:
    """A sentence: escaped, and what stands between backticks as code."""
    pieces = [_breakable(piece) for piece in re.split(r"`([^`]*)`", clean_line(text))]
    return "".join(f"<code>{piece}</code>" if odd % 2 else piece for odd, piece in enumerate(pieces))


def _breakable(text: str) -> str:
    """Text whose paths may be broken after a separator, and are copied without the breaks."""
    return "<wbr>".join(escape(part) for part in _BREAK.split(text))
