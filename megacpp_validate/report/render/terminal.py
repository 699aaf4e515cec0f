"""A document for a terminal or a log: colours and symbols where it has them, tables that fold and are never cut."""

from __future__ import annotations

import io
import re
from collections.abc import Collection
from typing import Final, Literal, TextIO

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from megacpp_validate.text import clean, clean_line

from .. import document as doc
from ..document import Block, Document, list_content
from ..marks import Mark, Tone

_TONES: Final = {
    Tone.BAD: "bold red", Tone.RISK: "yellow", Tone.MISSING: "yellow", Tone.GOOD: "green", Tone.QUIET: "dim",
}  # fmt: skip
_COMMAND: Final = re.compile(
    r"(?m)^((?:\s|\x1b\[[\d;]*m)*):(?=:)|#(?=#\[)"
)  # of GitHub's log, where a table folds text
_LONGEST_WORD: Final = 24  # characters that a table keeps in one piece
_NARROWEST: Final = 20  # columns that a paragraph keeps behind its margin


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
    terminal = _Terminal(console, verbose=verbose)
    terminal.print_text(_draw(document.title, "bold"))
    terminal.print_text(_draw(document.summary), first=terminal.symbol(document.mark))
    terminal.print_blocks(document.blocks)
    kept.flush()
    return _COMMAND.sub(lambda found: f"{found[0]} ", buffer.getvalue().decode(like.encoding))


class _Terminal:
    def __init__(self, console: Console, *, verbose: bool) -> None:
        self.console = console
        self.verbose = verbose
        self.has_symbols = console.encoding.lower().startswith("utf")

    def print_blocks(self, blocks: tuple[Block, ...]) -> None:
        """Print blocks, each by the method that is named like its type."""
        apart = False
        for block in blocks:
            if apart and isinstance(block, doc.Paragraph | doc.Bullets | doc.Figure):
                self.console.print()
            getattr(self, f"_print_{type(block).__name__.lower()}")(block)
            below = isinstance(block, doc.Table | doc.Diagnostic | doc.Preformatted)
            apart = below or (apart and isinstance(block, doc.Details))

    def _print_heading(self, block: doc.Heading) -> None:
        self.console.print()
        self.print_text(_draw(block.text, "bold"), first=self.symbol(block.mark))

    def _print_paragraph(self, block: doc.Paragraph) -> None:
        self.print_text(_draw(block.text), first=self.symbol(block.mark))

    def _print_bullets(self, block: doc.Bullets) -> None:
        for item in block.items:
            self.print_text(_draw(item), first=Text("  - "))

    def _print_preformatted(self, block: doc.Preformatted) -> None:
        self.console.print()
        self._print_lines(block.text)

    def _print_figure(self, block: doc.Figure) -> None:
        self.print_text(_draw(block.alternative))

    def _print_details(self, block: doc.Details) -> None:
        if self.verbose:
            self.print_blocks((doc.Heading(block.summary, 3), *block.blocks))

    def _print_diagnostic(self, found: doc.Diagnostic) -> None:
        self.console.print()
        head = _draw(found.name, "bold").append(f" {clean_line(found.mark.word)}", _TONES[found.mark.tone])
        head.append(f" [{clean_line(found.code)}]" if found.code else "", "dim")
        self.print_text(head, first=self.symbol(found.mark))
        if found.message:
            self.print_text(_draw(found.message), first=Text("    "))
        rows = [(clean_line(label), self._inline(one)) for label, content in found.list_fields() for one in content]
        rows += [("next", _draw(found.help, "green"))] if found.help else []
        width, above = max((len(label) for label, _ in rows), default=0) + 2, ""
        for label, text in rows:
            first = Text("    ").append(f"{'' if label == above else label:<{max(width, 6)}}", "dim")
            self.print_text(text, first=first, whole=label == "at")
            above = label
        if found.output and self.verbose:
            self._print_lines(found.output)

    def _print_table(self, table: doc.Table) -> None:
        self.console.print()
        if table.caption:
            self.print_text(_draw(table.caption, "bold"))
        grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        rows = [[Text("\n").join(map(self._inline, list_content(cell))) for cell in row] for row in table.rows]
        places = {
            at for row in table.rows for at, cell in enumerate(row)
            if any(isinstance(one, doc.Place) for one in list_content(cell))
        }  # fmt: skip
        whole = places | table.numeric  # a path in two pieces can be neither clicked nor searched for
        heads = [clean_line(name) for name in table.columns]
        columns = [[row[at].plain for row in rows] for at in range(len(heads))]
        room = self.console.width - 2 * len(heads)
        widths = _share_out(heads, columns, whole, room, _LONGEST_WORD)
        if sum(widths) > room:
            heads = [name.replace("_", "_\n") for name in heads]
            widths = _share_out(heads, columns, whole, room, _LONGEST_WORD // 2)
        for at, name in enumerate(heads):
            justify: Literal["left", "right"] = "right" if at in table.numeric else "left"
            grid.add_column(Text(name), overflow="fold", width=widths[at], justify=justify)
        for row in rows:
            grid.add_row(*row)
        width = self.console.width
        self.console.width = max(width, sum(widths) + 2 * len(widths))
        self.console.print(grid)
        self.console.width = width

    def _inline(self, one: doc.Inline) -> Text:
        match one:
            case Mark():
                return self.symbol(one).append(clean_line(one.word), _TONES[one.tone])
            case doc.Place():
                return Text(clean_line(str(one)), "cyan")
            case doc.Link():
                return self.symbol(one.mark).append(_draw(one.text))
        return _draw(one)

    def symbol(self, mark: Mark | None) -> Text:
        """The symbol of a mark, or its letter where the terminal has no symbols."""
        if mark is None:
            return Text()
        return Text().append(f"{mark.symbol if self.has_symbols else mark.letter} ", _TONES[mark.tone])

    def print_text(self, text: Text, *, first: Text | None = None, whole: bool = False) -> None:
        """Print a paragraph behind a margin.

        Args:
            first: the margin of its first line.
            whole: keep it on one line: a path in two pieces can be neither clicked nor searched for.
        """
        margin = first if first is not None else Text()
        indent = margin.cell_len
        width = max(self.console.width - indent, _NARROWEST)
        for line in [text] if whole else text.wrap(self.console, width):
            line.rstrip()
            self.console.print(margin + line, soft_wrap=True)
            margin = Text(" " * indent)

    def _print_lines(self, text: str) -> None:
        for line in clean(text).rstrip("\n").split("\n"):
            self.console.print(Text(f"    {line.expandtabs(4)}"), soft_wrap=True)


def _share_out(
    heads: list[str], columns: list[list[str]], whole: Collection[int], room: int, longest: int
) -> list[int]:
    """The width of each column: its longest word, and of what is left as much as it needs, the least needy first.

    Args:
        whole: columns whose lines stay in one piece.
        room: of all columns together; a screen that is too small for the words gets a wider table.
        longest: characters of a word that stay in one piece.
    """
    texts = [[head, *cells] for head, cells in zip(heads, columns, strict=True)]
    full = [max(len(line) for text in listed for line in text.split("\n")) for listed in texts]
    words = [max((len(word) for text in listed for word in text.split()), default=1) for listed in texts]
    widths = [size if at in whole else min(words[at], longest) for at, size in enumerate(full)]
    left = list(range(len(heads)))
    for at in sorted(left, key=lambda at: full[at] - widths[at]):
        widths[at] += max(0, min(full[at] - widths[at], (room - sum(widths)) // len(left)))
        left.remove(at)
    return widths


def _draw(sentence: str, style: str = "") -> Text:
    """A sentence with its code set off; the backticks stay, for where there is no colour."""
    text = Text()
    for number, piece in enumerate(re.split(r"(`[^`]*`)", clean_line(sentence))):
        text.append(piece, "bold cyan" if number % 2 else style)
    return text
