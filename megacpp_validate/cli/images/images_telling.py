"""Plans, builds and proofs of images, in the form and at the place that was asked for."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from ...images.build_result import ImageBuild, ImagePlans, ImageProof
from ...report.terminal import images as terminal_images
from ..app import Exit, Format, refuse

Told = ImagePlans | ImageBuild | ImageProof


def tell_image(told: Told, fmt: Format, output: Path | None) -> None:
    """Print it, or write it to a file."""
    if output is None:
        _write(told, fmt, Console(soft_wrap=False))
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("w", encoding="utf-8") as stream:
            _write(told, fmt, Console(file=stream))
    except OSError as fault:
        refuse(
            f"{output} cannot be written: {fault.strerror or fault}. Likely cause: it is a folder, or lies in a place "
            "that is not yours. Next step: give --output a file in a folder that you can write.",
            Exit.WRONG_ARGUMENTS,
        )


def _write(told: Told, fmt: Format, console: Console) -> None:
    if fmt is Format.JSON:
        (console.file or sys.stdout).write(json.dumps(asdict(told), indent=2, sort_keys=True) + "\n")
    elif isinstance(told, ImagePlans):
        terminal_images.render_plans(told, console=console)
    elif isinstance(told, ImageBuild):
        terminal_images.render_build(told, console=console)
    else:
        terminal_images.render_proof(told, console=console)
