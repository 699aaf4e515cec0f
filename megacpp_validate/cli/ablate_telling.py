"""The result of an ablation, in the form and at the place that was asked for."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from ..evidence.ablation import AblationResult
from ..evidence.whole_file import write_whole
from ..report.markdown_ablation import render_ablation_page
from ..report.terminal_ablation import render_ablation
from .app import Exit, Format, refuse


def tell_ablation(result: AblationResult, fmt: Format, output: Path | None) -> None:
    """Print a result, or write it to a file."""
    if fmt not in (Format.TABLE, Format.JSON, Format.MARKDOWN):
        refuse(
            f"this result is not told as {fmt.value}. Next step: choose table, json or markdown.", Exit.WRONG_ARGUMENTS
        )
    if output is None:
        if fmt is Format.TABLE:
            render_ablation(result, console=Console())
        else:
            sys.stdout.write(_text(result, fmt))
        return
    try:
        write_whole(output, _text(result, fmt))
    except OSError as fault:
        refuse(
            f"{output} cannot be written: {fault.strerror or fault}. Likely cause: it is a folder, or lies in a place "
            "that is not yours. Next step: give --output a file in a folder that you can write.",
            Exit.WRONG_ARGUMENTS,
        )


def _text(result: AblationResult, fmt: Format) -> str:
    if fmt is Format.JSON:
        return result.model_dump_json(indent=2) + "\n"
    if fmt is Format.MARKDOWN:
        return render_ablation_page(result)
    console = Console(record=True, quiet=True, width=120)
    with console.capture() as captured:
        render_ablation(result, console=console)
    return captured.get()
