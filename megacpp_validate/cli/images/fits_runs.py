"""The verb that says whether a stack fits: what it runs, and the exit code of each answer."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from ...catalog.bridge import Catalog, matrix_folder
from ...catalog.images import read_images
from ...catalog.needs import read_needs
from ...environments.plan import UnknownTarget, find_target
from ...images.fit_result import FitResult, FitVerdict
from ...images.locks import read_image_lock
from ...images.refusals import ImageRefused
from ...images.stack import stack_of_image, stack_of_words
from ...report.markdown.lock import tell_fit
from ...report.terminal.lock import render_fit
from ..app import TOOL, Exit, foreseen
from ..told_options import PageFormat
from ..whole_telling import tell_whole
from .image_rows import judge_stacks


@foreseen({ImageRefused: Exit.WRONG_ARGUMENTS, UnknownTarget: Exit.WRONG_ARGUMENTS})
def run_fits(
    catalog: Catalog,
    matrix: Path | None,
    te: str | None,
    parts: tuple[str, ...],
    fmt: PageFormat,
    output: Path | None,
    *,
    verbose: bool,
    target: str = "",
) -> None:
    """Judge a stack that is given in words, or that of every image; closed where something does not fit."""
    started = time.monotonic()
    root = (matrix or matrix_folder()).absolute().parent
    images = read_images({target.id: target.machine for target in catalog.targets}, matrix, catalog.targets)
    if te is not None:  # an empty one, of a variable without a value, is no question about the images
        needs = read_needs([module.id for module in catalog.modules], matrix)
        stacks = [stack_of_words(te, parts, needs, find_target(catalog, target).id if target else "")]
    else:
        with_te = [image for image in images.image if image.te and target in ("", image.target)]
        stacks = [stack_of_image(images, image, read_image_lock(root / image.lock)) for image in with_te]
    found = judge_stacks(catalog, matrix, images, stacks)
    result = FitResult(tool=TOOL, stacks=found, seconds=round(time.monotonic() - started, 3))
    tell_whole(
        result,
        fmt,
        output,
        render=lambda console: render_fit(result, verbose=verbose, console=console),
        markdown=lambda: tell_fit(result),
    )
    lacks = any(stack.of(FitVerdict.UNKNOWN) for stack in found)
    refused = any(stack.refused for stack in found)
    raise typer.Exit(Exit.CLOSED if refused else Exit.EVIDENCE_MISSING if lacks else Exit.OPEN)
