"""A document for a terminal or a log: colours and symbols where it has them, tables that fold and are never cut."""

from __future__ import annotations

import io
import re
from typing import Final, TextIO, assert_never

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

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
    Tone,
    list_content,
)

_TONES: Final = {
    Tone.BAD: "bold red",
    Tone.RISK: "yellow",
    Tone.MISSING: "yellow",
    Tone.GOOD: "green",
    Tone.QUIET: "dim",
}
_NARROWEST: Final = 20  # columns that a paragraph keeps behind its margin
_LONGEST_WORDS: Final = (24, 12, 8, 5)  # characters that a table keeps in one piece, for narrower and narrower screens
_COMMAND: Final = re.compile(r"(?m)^((?:\s|\x1b\[[\d;]*m)*):(?=:)|#(?=#\[)")  # what GitHub's log takes for a command


def render_terminal(document: Document, *, verbose: bool = False, stream: TextIO | None = None) -> str:
    """The document as a console on `stream` shows it; without a stream, plain text with symbols.

    Args:
        verbose: print what is folded on a page, too.
        stream: where the text goes; its width, colours and encoding count.
    """
    like = Console(file=stream or io.StringIO())
    buffer = io.BytesIO()
    kept = io.TextIOWrapper(buffer, encoding=like.encoding, errors="replace", newline="")
    console = Console(
        file=kept, force_terminal=like.is_terminal, width=like.width, highlight=False, markup=False, emoji=False
    )
    _Terminal(console, verbose=verbose).print_document(document)
    kept.flush()
    text = buffer.getvalue().decode(like.encoding)
    return _COMMAND.sub(lambda found: f"{found[0]} ", text)


class _Terminal:
    def __init__(self, console: Console, *, verbose: bool) -> None:
        self.console = console
        self.verbose = verbose
        self.has_symbols = console.encoding.lower().startswith("utf")

    def print_document(self, document: Document) -> None:
        self._print(_draw(document.title, "bold"))
        self._print(_draw(document.summary), first=self._symbol(document.mark))
        self._print_blocks(document.blocks)

    def _print_blocks(self, blocks: tuple[Block, ...]) -> None:
        apart = False
        for block in blocks:
            if apart and isinstance(block, Paragraph | Bullets | Figure):
                self._blank()
            self._print_block(block)
            apart = isinstance(block, Table | Diagnostic | Preformatted) or (apart and isinstance(block, Details))

    def _print_block(self, block: Block) -> None:
        match block:
            case Heading():
                self._blank()
                self._print(_draw(block.text, "bold"), first=self._symbol(block.mark))
            case Paragraph():
                self._print(_draw(block.text), first=self._symbol(block.mark))
            case Bullets():
                for item in block.items:
                    self._print(_draw(item), first=Text("  - "))
            case Preformatted():
                self._blank()
                self._print_lines(block.text, 4)
            case Table():
                self._print_table(block)
            case Diagnostic():
                self._print_diagnostic(block)
            case Figure():
                self._print(_draw(block.alternative))
            case Details():
                if self.verbose:
                    self._print_block(Heading(block.summary, 3, block.mark))
                    self._print_blocks(block.blocks)
            case _:
                assert_never(block)

    def _print_diagnostic(self, found: Diagnostic) -> None:
        self._blank()
        head = _draw(found.name, "bold").append(f" {clean_line(found.mark.word)}", _TONES[found.mark.tone])
        self._print(
            head.append(f" [{clean_line(found.code)}]" if found.code else "", "dim"), first=self._symbol(found.mark)
        )
        if found.message:
            self._print(_draw(found.message), indent=4)
        rows = found.list_fields()
        width = max([len("next"), *(len(clean_line(label)) for label, _ in rows)]) + 2
        for label, content in rows:
            for number, one in enumerate(content):
                first = Text("    ").append(f"{'' if number else clean_line(label):<{width}}", "dim")
                if isinstance(one, Place):
                    self.console.print(first + self._inline(one), soft_wrap=True)
                else:
                    self._print(self._inline(one), first=first)
        if found.help:
            self._print(_draw(found.help, "green"), first=Text("    ").append(f"{'next':<{width}}", "dim"))
        if found.output and self.verbose:
            self._print_lines(found.output, 4)

    def _print_table(self, table: Table) -> None:
        self._blank()
        if table.caption:
            self._print(_draw(table.caption, "bold"))
        width = self.console.width
        shown, heads = self._fit(table, width)
        grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for at, least in shown.items():
            grid.add_column(
                Text(heads[at]),
                overflow="fold",
                no_wrap=_holds_place(table, at) or at in table.numeric,
                min_width=least,
                justify="right" if at in table.numeric else "left",
            )
        for row in table.rows:
            grid.add_row(*(self._content(row[at]) for at in shown))
        self.console.width = max(width, _measure(shown))  # a path in two pieces can be neither clicked nor searched for
        self.console.print(grid)
        self.console.width = width

    def _fit(self, table: Table, width: int) -> tuple[dict[int, int], list[str]]:
        """Columns that are shown with the least width of each, and the headings.

        Words stay whole, or else optional columns are left out; where that is not enough, words are folded.
        """
        heads = [clean_line(name) for name in table.columns]
        for longest in _LONGEST_WORDS:
            shown = {at: self._least(table, at, heads[at], longest) for at in range(len(heads))}
            while _measure(shown) > width and table.optional & shown.keys():
                del shown[max(table.optional & shown.keys())]
            if _measure(shown) <= width:
                break
            heads = [name.replace("_", "_\n") for name in map(clean_line, table.columns)]
        return shown, heads

    def _least(self, table: Table, at: int, head: str, longest: int) -> int:
        """Characters that a column needs at least."""
        cells = [self._content(row[at]) for row in table.rows]
        if _holds_place(table, at) or at in table.numeric:
            return max((line.cell_len for cell in cells for line in cell.split()), default=1)
        words = (len(word) for cell in (head, *(cell.plain for cell in cells)) for word in cell.split())
        return min(max(words, default=1), longest)

    def _content(self, content: Content) -> Text:
        return Text("\n").join(map(self._inline, list_content(content)))

    def _inline(self, one: Inline) -> Text:
        match one:
            case str():
                return _draw(one)
            case Mark():
                return self._symbol(one).append(clean_line(one.word), _TONES[one.tone])
            case Place():
                return Text(clean_line(str(one)), "cyan")
            case Link():
                return self._symbol(one.mark).append(_draw(one.text))
            case _:
                assert_never(one)

    def _symbol(self, mark: Mark | None) -> Text:
        if mark is None:
            return Text()
        return Text().append(f"{mark.symbol if self.has_symbols else mark.letter} ", _TONES[mark.tone])

    def _blank(self) -> None:
        self.console.print()

    def _print(self, text: Text, *, indent: int = 0, first: Text | None = None) -> None:
        """Print a paragraph behind a margin; `first` is the margin of its first line."""
        margin = first if first is not None else Text(" " * indent)
        indent = margin.cell_len
        for line in text.wrap(self.console, max(self.console.width - indent, _NARROWEST)):
            line.rstrip()
            self.console.print(margin + line, soft_wrap=True)
            margin = Text(" " * indent)

    def _print_lines(self, text: str, indent: int) -> None:
        for line in clean(text).rstrip("\n").split("\n"):
            self.console.print(Text(" " * indent + line.expandtabs(4)), soft_wrap=True)


def _measure(columns: dict[int, int]) -> int:
    """Characters of a table whose columns have these widths."""
    return sum(columns.values()) + 2 * max(len(columns) - 1, 0)


def _holds_place(table: Table, at: int) -> bool:
    return any(isinstance(one, Place) for row in table.rows for one in list_content(row[at]))


def _draw(sentence: str, style: str = "") -> Text:
    """A sentence with its code set off; the backticks stay, for where there is no colour."""
    text = Text()
    for number, piece in enumerate(re.split(r"(`[^`]*`)", clean_line(sentence))):
        text.append(piece, "bold cyan" if number % 2 else style)
    return text
