"""The verb of the search for the first bad release: its arguments."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ...catalog.bridge import read_catalog
from ..app import Format, MatrixOption, OutputOption, app
from ..sessions.seeds import LARGEST_SEED
from ..told_options import PageFormat, PageFormatOption


class Tier(StrEnum):
    """What judges a release."""

    STATIC = "static"
    GPU = "gpu"


@app.command()
def te_bisect(
    good: Annotated[str, typer.Argument(help="Release that is good.")],
    bad: Annotated[str, typer.Argument(help="Release that is bad; the same one, if only an --axis changes.")],
    module: Annotated[str, typer.Option("--module", help="Bridge module that breaks between them.")],
    tier: Annotated[
        Tier | None,
        typer.Option(
            help="static: by its sources, anywhere. gpu: by its probe. Without it: gpu with a target or axis."
        ),
    ] = None,
    target: Annotated[str, typer.Option("--target", help="A row of matrix/targets.toml; of the gpu tier.")] = "",
    overlays: Annotated[
        list[Path] | None, typer.Option("--overlays", help="Folders that hold releases; else MEGACPP_OVERLAYS.")
    ] = None,
    python: Annotated[str, typer.Option(help="Interpreter that they stand on; else the host's.")] = "",
    axes: Annotated[
        list[str] | None,
        typer.Option(
            "--axis", help="NAME=VALUE:DIR,VALUE:DIR: a site folder a value, from good to bad; may be repeated."
        ),
    ] = None,
    flaky: Annotated[float, typer.Option(min=0, max=0.45, help="Probability that one run is wrong.")] = 0.0,
    error: Annotated[
        float, typer.Option(min=1e-9, max=0.45, help="That the answer may be wrong with, if flaky.")
    ] = 0.01,
    patience: Annotated[int, typer.Option(min=1, help="Releases without an answer before it ends with a range.")] = 8,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Of the first run of a point.")] = 0,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one probe may take.")] = 300.0,
    answers: Annotated[Path, typer.Option(help="Folder for answers; what lies there is not asked again.")] = Path(
        ".megacpp/bisect"
    ),
    fmt: PageFormatOption = PageFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Which release is the first that breaks a module, and is it Transformer Engine at all?

    By search, both ends confirmed first. A release that cannot be built or imported is told apart from one in which the
    module fails. With --axis (torch, cudnn, cublas, flash-attn, deep-gemm) the answer may be another component.
    """
    from .bisect_runs import Asked, run_bisect

    asked = Asked(
        good=good,
        bad=bad,
        module=module,
        is_static=tier is Tier.STATIC or (tier is None and not (target or overlays or axes)),
        target=target,
        overlays=tuple(overlays or ()),
        python=python,
        axes=tuple(axes or ()),
        flaky=flaky,
        error=error,
        patience=patience,
        seed=seed,
        limit_s=limit,
        answers=answers,
        matrix=matrix,
    )
    run_bisect(read_catalog(matrix), asked, Format(fmt), output)
