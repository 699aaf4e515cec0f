"""How marks and sentences are drawn on a console: never as markup, for they hold source text of others."""

from __future__ import annotations

import re
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..evidence.values import SourceLine
from .marks import Mark

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_TONES: Final = {"bad": "bold red", "risk": "yellow", "good": "green", "quiet": "dim"}
_NARROWEST: Final = 20


def plain(text: str) -> str:
    """Text without what a terminal would obey: escape sequences, carriage returns, changes of direction."""
    return _CONTROL.sub("", text)


def is_wide(console: Console) -> bool:
    """Whether the console's encoding has the symbols; a log in ASCII gets letters instead."""
    return console.encoding.lower().startswith("utf")


def draw_step(old: str, new: str, console: Console) -> str:
    """From one release to the other."""
    return f"{plain(old)} {'→' if is_wide(console) else '->'} {plain(new)}"


def draw_symbol(mark: Mark, console: Console) -> Text:
    """The mark's symbol, and a space."""
    return Text().append(f"{mark.symbol if is_wide(console) else mark.letter} ", _TONES[mark.tone])


def draw_mark(mark: Mark, console: Console, name: str = "") -> Text:
    """Symbol, name if there is one, and word: "✗ permute breaks"."""
    text = draw_symbol(mark, console)
    if name:
        text.append(f"{plain(name)} ", "bold")
    return text.append(mark.word, _TONES[mark.tone])


def draw_sentence(sentence: str, style: str = "") -> Text:
    """A sentence with its code set off; the backticks stay, for where there is no colour."""
    text = Text()
    for number, piece in enumerate(re.split(r"(`[^`]*`)", plain(sentence))):
        text.append(piece, "bold cyan" if number % 2 else style)
    return text


def print_indented(console: Console, text: Text, indent: int, *, first: Text | None = None) -> None:
    """Print a paragraph behind a margin of `indent` columns; `first` is the margin of its first line."""
    width = max(console.width - indent, _NARROWEST)
    margin = first or Text(" " * indent)
    for line in text.wrap(console, width):
        line.rstrip()
        console.print(margin + line, soft_wrap=True)
        margin = Text(" " * indent)


def print_opening(console: Console, title: str, *sentences: str) -> None:
    """Print what a result is called, and below it each sentence on the whole of it; an empty one is none."""
    console.print(Text(title, "bold"))
    for sentence in filter(None, sentences):
        print_indented(console, draw_sentence(sentence), 0)


def make_folding_table(*headings: str) -> Table:
    """A table whose cells go on in the next line where they are too wide, and are never cut."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def print_marked(console: Console, mark: Mark, text: Text, indent: int = 2) -> None:
    """Print a paragraph behind a symbol."""
    symbol = draw_symbol(mark, console)
    print_indented(console, text, indent + 2, first=Text(" " * indent) + symbol)


def print_labelled(console: Console, label: str, text: Text, width: int) -> None:
    """Print a paragraph behind a label, `width` columns wide, in a margin of four."""
    first = Text("    ").append(f"{plain(label):<{width}}", "dim")
    print_indented(console, text, 4 + width, first=first)


def print_place(console: Console, label: str, line: SourceLine | None, width: int) -> None:
    """Print `file:line` behind a label; nothing where there is none.

    Never folded: a path in two pieces can be neither clicked nor searched for.
    """
    if line is None:
        return
    row = Text("    ").append(f"{plain(label):<{width}}", "dim").append(plain(f"{line.file}:{line.line}"), "cyan")
    console.print(row, soft_wrap=True)
