"""A document for a terminal or a log: colours and symbols where it has them, tables that fold and are never cut."""

from __future__ import annotations

import io
import re
from typing import Final, TextIO

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from megacpp_validate.text import clean, clean_line

from .. import document as doc
from ..document import Block, Document, list_content
from ..marks import Mark, Tone

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
        """Print a document."""
        self._print(_draw(document.title, "bold"))
        self._print(_draw(document.summary), first=self._symbol(document.mark))
        self._print_blocks(document.blocks)

    def _print_blocks(self, blocks: tuple[Block, ...]) -> None:
        apart = False
        for block in blocks:
            if apart and isinstance(block, doc.Paragraph | doc.Bullets | doc.Figure):
                self.console.print()
            getattr(self, f"_print_{type(block).__name__.lower()}")(block)
            below = isinstance(block, doc.Table | doc.Diagnostic | doc.Preformatted)
            apart = below or (apart and isinstance(block, doc.Details))

    def _print_heading(self, block: doc.Heading) -> None:
        self.console.print()
        self._print(_draw(block.text, "bold"), first=self._symbol(block.mark))

    def _print_paragraph(self, block: doc.Paragraph) -> None:
        self._print(_draw(block.text), first=self._symbol(block.mark))

    def _print_bullets(self, block: doc.Bullets) -> None:
        for item in block.items:
            self._print(_draw(item), first=Text("  - "))

    def _print_preformatted(self, block: doc.Preformatted) -> None:
        self.console.print()
        self._print_lines(block.text)

    def _print_figure(self, block: doc.Figure) -> None:
        self._print(_draw(block.alternative))

    def _print_details(self, block: doc.Details) -> None:
        if self.verbose:
            self._print_blocks((doc.Heading(block.summary, 3, block.mark), *block.blocks))

    def _print_diagnostic(self, found: doc.Diagnostic) -> None:
        self.console.print()
        head = _draw(found.name, "bold").append(f" {clean_line(found.mark.word)}", _TONES[found.mark.tone])
        head.append(f" [{clean_line(found.code)}]" if found.code else "", "dim")
        self._print(head, first=self._symbol(found.mark))
        if found.message:
            self._print(_draw(found.message), first=Text("    "))
        rows = [(label, one, self._inline(one)) for label, content in found.list_fields() for one in content]
        rows += [("next", found.help, _draw(found.help, "green"))] if found.help else []
        width = max((len(clean_line(label)) for label, *_ in rows), default=0) + 2
        above = ""
        for label, one, text in rows:
            first = Text("    ").append(f"{'' if label == above else clean_line(label):<{max(width, 6)}}", "dim")
            above = label
            if isinstance(one, doc.Place):  # a path in two pieces can be neither clicked nor searched for
                self.console.print(first + text, soft_wrap=True)
            else:
                self._print(text, first=first)
        if found.output and self.verbose:
            self._print_lines(found.output)

    def _print_table(self, table: doc.Table) -> None:
        self.console.print()
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

    def _fit(self, table: doc.Table, width: int) -> tuple[dict[int, int], list[str]]:
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

    def _least(self, table: doc.Table, at: int, head: str, longest: int) -> int:
        """Characters that a column needs at least."""
        cells = [self._content(row[at]) for row in table.rows]
        if _holds_place(table, at) or at in table.numeric:
            return max((line.cell_len for cell in cells for line in cell.split()), default=1)
        words = (len(word) for cell in (head, *(cell.plain for cell in cells)) for word in cell.split())
        return min(max(words, default=1), longest)

    def _content(self, content: doc.Content) -> Text:
        return Text("\n").join(map(self._inline, list_content(content)))

    def _inline(self, one: doc.Inline) -> Text:
        match one:
            case Mark():
                return self._symbol(one).append(clean_line(one.word), _TONES[one.tone])
            case doc.Place():
                return Text(clean_line(str(one)), "cyan")
            case doc.Link():
                return self._symbol(one.mark).append(_draw(one.text))
        return _draw(one)

    def _symbol(self, mark: Mark | None) -> Text:
        if mark is None:
            return Text()
        return Text().append(f"{mark.symbol if self.has_symbols else mark.letter} ", _TONES[mark.tone])

    def _print(self, text: Text, *, first: Text | None = None) -> None:
        """Print a paragraph behind a margin; `first` is the margin of its first line."""
        margin = first if first is not None else Text()
        indent = margin.cell_len
        for line in text.wrap(self.console, max(self.console.width - indent, _NARROWEST)):
            line.rstrip()
            self.console.print(margin + line, soft_wrap=True)
            margin = Text(" " * indent)

    def _print_lines(self, text: str) -> None:
        for line in clean(text).rstrip("\n").split("\n"):
            self.console.print(Text(f"    {line.expandtabs(4)}"), soft_wrap=True)


def _measure(columns: dict[int, int]) -> int:
    """Characters of a table whose columns have these widths."""
    return sum(columns.values()) + 2 * max(len(columns) - 1, 0)


def _holds_place(table: doc.Table, at: int) -> bool:
    return any(isinstance(one, doc.Place) for row in table.rows for one in list_content(row[at]))


def _draw(sentence: str, style: str = "") -> Text:
    """A sentence with its code set off; the backticks stay, for where there is no colour."""
    text = Text()
    for number, piece in enumerate(re.split(r"(`[^`]*`)", clean_line(sentence))):
        text.append(piece, "bold cyan" if number % 2 else style)
    return text
