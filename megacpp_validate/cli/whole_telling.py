"""A result told at once, in the form and at the place that was asked for: whole, or not at all."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO, assert_never

from rich.console import Console

from ..evidence.values import Frozen
from .output import write_told
from .told_options import PageFormat


def tell_whole(
    result: Frozen,
    fmt: PageFormat,
    output: Path | None,
    *,
    render: Callable[[Console], None],
    markdown: Callable[[], Sequence[str]],
) -> None:
    """Print a result, or write it to a file; whoever stops reading it half way changes no exit code.

    Args:
        render: draws it on a console.
        markdown: its lines in Markdown.
    """
    match fmt:
        case PageFormat.TABLE:
            text = draw_text(render, sys.stdout if output is None else None)
        case PageFormat.JSON:
            text = result.model_dump_json(indent=2) + "\n"
        case PageFormat.MARKDOWN:
            text = "\n".join(markdown()) + "\n"
        case _:
            assert_never(fmt)
    write_told(None, lambda: text, output)


def draw_text(render: Any, stream: TextIO | None) -> str:
    """What is drawn, as the console at hand would show it."""
    like = Console(file=stream or io.StringIO())
    buffer = io.BytesIO()
    kept = io.TextIOWrapper(buffer, encoding=like.encoding, errors="replace", newline="")
    render(Console(file=kept, force_terminal=like.is_terminal, width=like.width))
    kept.flush()
    return buffer.getvalue().decode(like.encoding)
