"""A document as one page that works from disk: no server, no network, no script; narrow screens and print count."""

from __future__ import annotations

import re
from functools import cache
from typing import Final, assert_never

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

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
_BREAK: Final = re.compile(r"(?<=[/.])(?=[^/.\s])|(?<=[A-Za-z0-9]_)(?=[A-Za-z0-9])")
_ELSEWHERE: Final = re.compile(r"(?!https?:)[A-Za-z][A-Za-z0-9+.-]*:")  # a scheme that a page must not lead to
_WIDE: Final = 4  # columns from which a table may need to scroll on a telephone
_EMPTY: Final = Markup("")


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


def render_blocks(blocks: tuple[Block, ...]) -> Markup:
    """Blocks one below the other."""
    return Markup("\n").join(map(_render, blocks))


def _render(block: Block) -> Markup:
    match block:
        case Heading():
            tag = f"h{min(max(block.level, 2), 6)}"
            return Markup("<{0} id='{3}'>{1}{2}</{0}>").format(
                tag, _symbol(block.mark), _sentence(block.text), make_anchor(block.text)
            )
        case Paragraph():
            tone = Markup(" class='note {}'").format(block.mark.tone) if block.mark else _EMPTY
            return Markup("<p{}>{}{}</p>").format(tone, _symbol(block.mark), _sentence(block.text))
        case Bullets():
            return Markup("<ul>{}</ul>").format(
                _EMPTY.join(Markup("<li>{}</li>").format(_sentence(item)) for item in block.items)
            )
        case Preformatted():
            return Markup("<pre>{}</pre>").format(clean(block.text).rstrip("\n"))
        case Table():
            return _tabulate(block)
        case Diagnostic():
            return _diagnose(block)
        case Figure():
            return Markup("<figure role='img' aria-label='{}'>{}</figure>").format(
                clean_line(block.alternative),
                Markup(clean(block.svg)),  # noqa: S704 - our own drawing, which escapes what it shows
            )
        case Details():
            return _fold(
                Markup("{}{}").format(_symbol(block.mark), _sentence(block.summary)), render_blocks(block.blocks)
            )
        case _:
            assert_never(block)


def make_anchor(text: str) -> str:
    """The id of a heading, for links to it."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "section"


def _diagnose(found: Diagnostic) -> Markup:
    rows = [
        Markup("<div><dt>{}</dt><dd>{}</dd></div>").format(clean_line(label), _content(content))
        for label, content in found.list_fields()
    ]
    if found.help:
        rows.append(Markup("<div class='next'><dt>next</dt><dd>{}</dd></div>").format(_sentence(found.help)))
    code = Markup(" <span class='code'>{}</span>").format(clean_line(found.code)) if found.code else _EMPTY
    message = Markup("<p>{}</p>").format(_sentence(found.message)) if found.message else _EMPTY
    output = _fold(Markup("output"), Markup("<pre>{}</pre>").format(clean(found.output))) if found.output else _EMPTY
    return Markup("<article class='finding {}'><h3>{} {}{}</h3>{}<dl>{}</dl>{}</article>").format(
        found.mark.tone, _badge(found.mark), _sentence(found.name), code, message, _EMPTY.join(rows), output
    )


def _tabulate(table: Table) -> Markup:
    def classes(at: int) -> Markup:
        return Markup(" class='number'") if at in table.numeric else _EMPTY

    heads = (Markup("<th{}>{}</th>").format(classes(at), _sentence(name)) for at, name in enumerate(table.columns))
    rows = (
        Markup("<tr>{}</tr>").format(
            _EMPTY.join(Markup("<td{}>{}</td>").format(classes(at), _content(cell)) for at, cell in enumerate(row))
        )
        for row in table.rows
    )
    caption = Markup("<caption>{}</caption>").format(_sentence(table.caption)) if table.caption else _EMPTY
    hint = Markup("<p class='hint'>This table scrolls sideways.</p>") if len(table.columns) >= _WIDE else _EMPTY
    return Markup(
        "{}<div class='scroll' tabindex='0'><table>{}<thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>"
    ).format(hint, caption, _EMPTY.join(heads), Markup("\n").join(rows))


def _fold(summary: Markup, inner: Markup) -> Markup:
    return Markup("<details><summary>{}</summary>\n{}\n</details>").format(summary, inner)


def _content(content: Content) -> Markup:
    return Markup("<br>").join(map(_inline, list_content(content)))


def _inline(one: Inline) -> Markup:
    match one:
        case str():
            return _sentence(one)
        case Mark():
            return _badge(one)
        case Place():
            return Markup("<code>{}</code>").format(_breakable(clean_line(str(one))))
        case Link():
            return _link(one)
        case _:
            assert_never(one)


def _link(link: Link) -> Markup:
    text = Markup("{}{}").format(_symbol(link.mark), _sentence(link.text))
    if _ELSEWHERE.match(link.target):
        return text
    tone = Markup(" class='{}'").format(link.mark.tone) if link.mark else _EMPTY
    return Markup("<a href='{}'{}>{}</a>").format(clean_line(link.target), tone, text)


def _badge(mark: Mark) -> Markup:
    return Markup("<span class='badge {}'>{}{}</span>").format(mark.tone, _symbol(mark), clean_line(mark.word))


def _symbol(mark: Mark | None) -> Markup:
    return Markup("<span aria-hidden='true'>{}</span> ").format(mark.symbol) if mark is not None else _EMPTY


def _sentence(text: str) -> Markup:
    """A sentence: escaped, and what stands between backticks as code."""
    pieces = [_breakable(piece) for piece in re.split(r"`([^`]*)`", clean_line(text))]
    return _EMPTY.join(
        Markup("<code>{}</code>").format(piece) if odd % 2 else piece for odd, piece in enumerate(pieces)
    )


def _breakable(text: str) -> Markup:
    """Text whose paths may be broken after a separator, and are copied without the breaks."""
    return Markup("<wbr>").join(escape(part) for part in _BREAK.split(text))
