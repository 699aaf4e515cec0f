"""What was done with a sealed JIT cache, in a terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.text import Text

from ...jitcache.result import JitCacheResult
from ..ink import draw_sentence, plain, print_indented, print_labelled
from ..summaries import count
from ..words.jit import say_bytes, say_caches, say_difference, say_path

_LABEL: Final = 11
_SHOWN: Final = 6


def render_cache(result: JitCacheResult, *, console: Console | None = None) -> None:
    """Print what was done and what the cache is; variables as a shell reads them."""
    console = console or Console()
    console.print(Text(plain(f"JIT cache of {result.architecture}: {result.deed}"), "bold"))
    print_indented(console, draw_sentence(say_deed(result)), 0)
    for difference in result.differences:
        print_labelled(console, "differs", draw_sentence(say_difference(difference), "red"), _LABEL)
    if result.differences:
        step = "take it to the stack that it was made for, prewarm here, or say --any-stack and expect misses"
        print_labelled(console, "next", draw_sentence(step, "green"), _LABEL)
    stack = ", ".join(f"{name} {version}" for name, version in result.stack.items())
    lines = {
        "folder": result.folder, "manifest": f"{result.manifest}, made {result.made}",
        "holds": say_caches(result.caches),
        "tasks": ", ".join(result.tasks), "not in it": ", ".join(result.missing), "for": f"{stack}; {result.mode}",
        "archive": f"{result.archive} {result.archive_hash}".strip(),
    }  # fmt: skip
    for label, line in lines.items():
        if line:
            print_labelled(console, label, draw_sentence(line, "dim"), _LABEL)
    if not result.in_place:
        said = "made in another folder, whose paths stand in it: use it by a working copy (jit_cache open)"
        print_labelled(console, "note", draw_sentence(said, "yellow"), _LABEL)
    if result.extra:
        shown = ", ".join(map(say_path, result.extra[:_SHOWN]))
        more = f", and {len(result.extra) - _SHOWN} more" if len(result.extra) > _SHOWN else ""
        since = "made since, and not exported" if result.deed == "export" else "made since"
        print_labelled(console, "beside it", draw_sentence(f"{shown}{more}: {since}", "yellow"), _LABEL)
    for name, value in result.variables.items():
        console.print(plain(f"export {name}={value}"), soft_wrap=True, markup=False, highlight=False)
    print_indented(console, draw_sentence(f"{result.seconds:.2f} s", "dim"), 0)


def say_deed(result: JitCacheResult) -> str:
    """What was done, in a sentence."""
    size = sum(cache.bytes for cache in result.caches)
    files = f"{count(sum(cache.files for cache in result.caches), 'file')} ({say_bytes(size)})"
    if result.differences:
        return f"Refused: it is of another stack in {count(len(result.differences), 'way')}; nothing was imported."
    match result.deed:
        case "export":
            size_of = f", {say_bytes(result.archive_bytes)}" if result.archive_bytes else ""
            return f"Exported: {files}, every hash right{size_of}."
        case "import" if result.kept:
            return f"It is there already: {files}, every hash right."
        case "import":
            return f"Imported and sealed: {files}, every hash right."
        case "open":
            return f"A working copy: {files}, every hash right."
        case "unseal":
            return "Open again: a prewarm may go on in it."
        case _ if not result.sealed:
            return (
                f"Whole, and not sealed: {files}, every hash right. It is neither exported nor verified so: "
                "`nox -s jit_cache -- seal`."
            )
        case _:
            return f"Sealed: {files}, every hash right."
