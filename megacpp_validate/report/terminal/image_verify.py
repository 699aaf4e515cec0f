"""The verdict on an image in a terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.text import Text

from ...images.verify_result import ImageVerdict
from ..ink import draw_mark, draw_sentence, plain, print_indented, print_labelled
from ..words.image_verify import mark_check, say_packages, summarize_image

_LABEL: Final = 8


def render_image_verdict(verdict: ImageVerdict, *, verbose: bool = False, console: Console | None = None) -> None:
    """Print every check, and what to do where one does not pass."""
    console = console or Console()
    console.print(Text(plain(verdict.image), "bold"), soft_wrap=True)
    for check in verdict.checks:
        console.print(draw_mark(mark_check(check.outcome), console, check.name), soft_wrap=True)
        print_indented(console, draw_sentence(check.says, "dim"), 4)
        if check.next_step:
            print_labelled(console, "next", draw_sentence(check.next_step, "green"), _LABEL)
    if said := say_packages(verdict):
        print_indented(console, draw_sentence(said, "dim"), 0)
    if verbose and verdict.unknown_licences:
        print_indented(console, draw_sentence(f"no licence said: {', '.join(verdict.unknown_licences)}", "dim"), 0)
    console.print()
    print_indented(console, draw_sentence(summarize_image(verdict), "bold"), 0)
