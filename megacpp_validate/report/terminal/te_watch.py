"""One run of the watch in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ...canary.dynamic.watch_result import WatchResult
from ..ink import draw_sentence, plain, print_indented
from ..markdown.te_watch import say_verdict, say_watch


def render_watch(result: WatchResult, *, console: Console | None = None) -> None:
    """Print what became of each release, the issue texts, and what waits for a GPU."""
    console = console or Console()
    place = f" on {plain(result.index)}" if result.index else ", as GPUs saw them; no index was asked"
    console.print(Text(f"Releases of Transformer Engine{place}, {result.asked_at}", "dim"), soft_wrap=True)
    for row in result.changed:
        code = f", exit code {said}" if (said := say_verdict(row)) else ""
        against = f" against {row.against}" if row.against else ""
        console.print(Text(f"  {plain(row.version)}  {row.standing.value}{against}{code}"), soft_wrap=True)
        for said in filter(None, (row.reason, row.withdrawn)):
            print_indented(console, draw_sentence(said, "yellow"), 6)
    for file in result.issues:
        console.print(Text(f"  issue text: {plain(file)}"), soft_wrap=True)
    for reason in result.left:
        print_indented(console, draw_sentence(f"left: {reason}", "yellow"), 2)
    for step in result.gpu:
        console.print(Text(f"  {step.new} on {step.target}: not-run; it waits for a machine with that label", "yellow"))
    print_indented(console, draw_sentence(f"{say_watch(result)[:1].upper()}{say_watch(result)[1:]}", "bold"), 0)
