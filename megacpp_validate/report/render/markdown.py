"""A document in Markdown, for the summary of a GitHub run, an issue or a README; foreign text is never syntax."""

from __future__ import annotations

import re
from typing import Final, assert_never
from urllib.parse import quote

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

# As references, which no Markdown parser reads as syntax; `_` and `.` inside a word are safe as they are.
_SYNTAX: Final = re.compile(
    r"""[&<>"'`*|\\\[\]#~$!@]|(?<![A-Za-z0-9_])_|_(?![A-Za-z0-9_])|:(?=//|:)|^[-+=](?=[\s\-=])"""
)
_NUMBERED: Final = re.compile(r"^(\d+)([.)])(?=\s)")


def render_markdown(document: Document) -> str:
    """The document with a title of level 2, as it stands in the summary of a run."""
    parts = [f"## {escape(document.title)}", f"**{_mark(document.mark)}{escape(document.summary)}**"]
    parts += [_render(block) for block in document.blocks]
    return "\n\n".join(filter(None, parts)) + "\n"


def escape(text: str) -> str:
    """Text that Markdown and HTML take as text, on one line; backticks around code become `<code>`."""
    pieces = re.split(r"`([^`]*)`", clean_line(text))
    return "".join(f"<code>{_escape(piece)}</code>" if odd % 2 else _escape(piece) for odd, piece in enumerate(pieces))


def _escape(text: str) -> str:
    text = _SYNTAX.sub(lambda found: f"&#{ord(found[0])};", text)
    return _NUMBERED.sub(r"\1&#46;" if text.lstrip("0123456789").startswith(".") else r"\1&#41;", text)


def _render(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * (block.level + 1)} {_mark(block.mark)}{escape(block.text)}"
        case Paragraph():
            return f"{_mark(block.mark)}{escape(block.text)}"
        case Bullets():
            return "\n".join(f"- {escape(item)}" for item in block.items)
        case Preformatted():
            return _preformat(block.text)
        case Table():
            return _tabulate(block)
        case Diagnostic():
            return _diagnose(block)
        case Figure():
            return escape(block.alternative)
        case Details():
            inner = "\n\n".join(map(_render, block.blocks))
            return _fold(f"{_mark(block.mark)}{escape(block.summary)}", inner)
        case _:
            assert_never(block)


def _diagnose(found: Diagnostic) -> str:
    code = f" ({escape(found.code)})" if found.code else ""
    parts = [f"#### {_mark(found.mark)}{escape(found.name)}: {escape(found.mark.word)}{code}", escape(found.message)]
    items = [f"- {escape(label)}: {_content(content)}" for label, content in found.list_fields()]
    if found.help:
        items.append(f"- **next**: {escape(found.help)}")
    parts.append("\n".join(items))
    if found.output:
        parts.append(_fold("output", _preformat(found.output)))
    return "\n\n".join(filter(None, parts))


def _tabulate(table: Table) -> str:
    rules = " | ".join("--:" if at in table.numeric else "---" for at in range(len(table.columns)))
    lines = [f"| {' | '.join(map(escape, table.columns))} |", f"| {rules} |"]
    lines += [f"| {' | '.join(map(_content, row))} |" for row in table.rows]
    return (f"**{escape(table.caption)}**\n\n" if table.caption else "") + "\n".join(lines)


def _preformat(text: str) -> str:
    """As HTML: a fence of backticks ends where the text has a longer one."""
    return f"<pre>{_escape(clean(text)).replace(chr(10), '&#10;')}</pre>"


def _fold(summary: str, inner: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{inner}\n\n</details>"


def _content(content: Content) -> str:
    return "<br>".join(map(_inline, list_content(content)))


def _inline(one: Inline) -> str:
    match one:
        case str():
            return escape(one)
        case Mark():
            return f"{_mark(one)}{escape(one.word)}"
        case Place():
            return f"<code>{_escape(clean_line(str(one)))}</code>"
        case Link():
            return f"[{_mark(one.mark)}{escape(one.text)}]({quote(clean_line(one.target), safe='/:#?=&%~')})"
        case _:
            assert_never(one)


def _mark(mark: Mark | None) -> str:
    return f"{mark.symbol} " if mark is not None else ""
