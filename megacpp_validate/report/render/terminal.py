"""A document for a terminal or a log: colours and symbols where it has them, tables that fold and are never cut."""

from __future__ import annotations

import io
import re
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
# A command of GitHub's log that a table makes by folding text.
_COMMAND: Final = re.compile(r"(?m)^((?:\s|\x1b\[[\d;]*m)*):(?=:)|#(?=#\[)")
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
        heads = [clean_line(name) for name in table.columns]
        if sum(map(len, heads)) + 2 * len(heads) > self.console.width:
            heads = [name.replace("_", "_\n") for name in heads]
        for at, name in enumerate(heads):
            texts = [name, *(row[at].plain for row in rows)]
            least = min(max((len(word) for text in texts for word in text.split()), default=1), _LONGEST_WORD)
            narrow = all(len(line) <= least for text in texts for line in text.split("\n"))
            justify: Literal["left", "right"] = "right" if at in table.numeric else "left"
            grid.add_column(Text(name), overflow="fold", min_width=least, no_wrap=narrow, justify=justify)
        for row in rows:
            grid.add_row(*row)
        self.console.print(grid, crop=False)

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


def _draw(sentence: str, style: str = "") -> Text:
    """A sentence with its code set off; the backticks stay, for where there is no colour."""
    text = Text()
    for number, piece in enumerate(re.split(r"(`[^`]*`)", clean_line(sentence))):
        text.append(piece, "bold cyan" if number % 2 else style)
    return text
