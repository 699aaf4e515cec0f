"""What a result says, in no format yet: headings, paragraphs, tables, lists, diagnostics, figures.

A result type has one `describe_<result>(result) -> Document` in `report/describe/`; a format has one renderer in
`report/render/`. Texts are plain; code, names and versions stand between backticks, and every renderer shows them as
code. Text of other people (receipts, exceptions, source lines) is passed as it is: each renderer cleans what it shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from .marks import Mark


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file that a reader can open; `line` 0 is the file as a whole."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True, slots=True)
class Link:
    """A text, behind a mark if there is one, that leads to a page or a file; formats without links show the text."""

    text: str
    target: str
    mark: Mark | None = None


Inline = str | Mark | Place | Link
"""One thing that a table cell or a field holds."""

Content = Inline | tuple[Inline, ...]
"""What a table cell or a field holds; several things stand one below the other."""


@dataclass(frozen=True, slots=True)
class Heading:
    """The title of what follows; level 2 is below the title of the document."""

    text: str
    level: int = 2
    mark: Mark | None = None


@dataclass(frozen=True, slots=True)
class Paragraph:
    """One or more sentences."""

    text: str
    mark: Mark | None = None


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list."""

    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Preformatted:
    """Text whose lines and spaces matter: a traceback, a command to copy."""

    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below headings.

    Attributes:
        numeric: columns whose values are aligned to the right.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Content, ...], ...]
    caption: str = ""
    numeric: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One thing that was judged: what, where, what was seen, and what to do. JUnit and annotations are made of these.

    Attributes:
        name: of what was judged: a cell, a check, a symbol.
        mark: the verdict on it.
        group: the module, stack or suite that it belongs to.
        message: what happened, in a sentence.
        fields: labelled details, in the order in which they are shown.
        help: the next step; empty where there is none.
        place: the line of this project that an annotation points to.
        output: text that was printed, such as a traceback.
        seconds: how long it took.
        code: stable identifier of the kind of finding.
    """

    name: str
    mark: Mark
    group: str = ""
    message: str = ""
    fields: tuple[tuple[str, Content], ...] = ()
    help: str = ""
    place: Place | None = None
    output: str = ""
    seconds: float = 0.0
    code: str = ""

    def list_fields(self) -> tuple[tuple[str, tuple[Inline, ...]], ...]:
        """The place and the fields that hold something."""
        place: tuple[tuple[str, Content], ...] = (("at", self.place),) if self.place is not None else ()
        listed = ((label, list_content(content)) for label, content in (*place, *self.fields))
        return tuple((label, content) for label, content in listed if content)


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing, and in words what it shows for formats that cannot draw."""

    svg: str
    alternative: str


@dataclass(frozen=True, slots=True)
class Details:
    """Blocks that a reader opens: folded on a page, printed in a terminal with `--verbose` only."""

    summary: str
    blocks: tuple[Block, ...]


Block = Heading | Paragraph | Bullets | Preformatted | Table | Diagnostic | Figure | Details


@dataclass(frozen=True, slots=True)
class Document:
    """What one result says.

    Attributes:
        title: what was asked.
        summary: the answer in one or two sentences.
        mark: the answer's look.
        blocks: the rest, in reading order; blocks without content are dropped.
        cases: everything that was judged, good ones included, for JUnit and annotations; without them the
            diagnostics among the blocks.
    """

    title: str
    summary: str
    mark: Mark
    blocks: tuple[Block, ...] = ()
    cases: tuple[Diagnostic, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", drop_empty(self.blocks))

    def judged(self) -> tuple[Diagnostic, ...]:
        """Everything that was judged."""
        return self.cases or tuple(find_diagnostics(self.blocks))


def drop_empty(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Blocks without content left out: tables without rows, lists without items, headings of nothing."""
    kept: list[Block] = []
    for block in reversed(tuple(blocks)):
        below = kept[-1] if kept else Heading("")
        match block:
            case Table(rows=()) | Bullets(items=()) | Paragraph(text="") | Preformatted(text=""):
                continue
            case Heading() if isinstance(below, Heading) and below.level <= block.level:
                continue
            case Details():
                inner = drop_empty(block.blocks)
                kept += [replace(block, blocks=inner)] if inner else []
            case _:
                kept.append(block)
    return tuple(reversed(kept))


def list_content(content: Content) -> tuple[Inline, ...]:
    """What a cell or a field holds, one by one; what is empty is left out."""
    listed = content if isinstance(content, tuple) else (content,)
    return tuple(one for one in listed if one != "")


def find_diagnostics(blocks: tuple[Block, ...]) -> Iterator[Diagnostic]:
    """Every diagnostic among blocks, those inside details included."""
    for block in blocks:
        if isinstance(block, Diagnostic):
            yield block
        elif isinstance(block, Details):
            yield from find_diagnostics(block.blocks)
