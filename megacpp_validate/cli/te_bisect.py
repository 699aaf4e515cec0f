"""The verb of the search for the first bad release."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .app import Format, FormatOption, MatrixOption, OutputOption, app, write_error_line
from .output import finish


class Tier(StrEnum):
    """What judges a release."""

    STATIC = "static"
    GPU = "gpu"


@app.command()
def te_bisect(
    good: Annotated[str, typer.Argument(metavar="GOOD", help="Release that is good.")],
    bad: Annotated[
        str, typer.Argument(metavar="BAD", help="Release that is bad; the same one where an --axis changes.")
    ],
    module: Annotated[str, typer.Option("--module", help="Bridge module that breaks between them.")],
    tier: Annotated[
        Tier | None,
        typer.Option(help="static: by sources, anywhere. gpu: by probes. Without it: gpu with a target or axis."),
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
    repeat: Annotated[int, typer.Option(min=1, help="Runs of a point; one bad run makes the point bad.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the first run of a point.")] = 0,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one probe may take.")] = 300.0,
    answers: Annotated[
        Path, typer.Option(help="Folder for receipts; a cell with a receipt there is not run again.")
    ] = Path(".megacpp/bisect"),
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Which release is the first that breaks a module, and is it Transformer Engine at all?

    The search confirms both ends first. A release that cannot be built or imported is no bad release. With --axis
    (torch, cudnn, cublas, flash-attn, deep-gemm) the answer may be another component.
    """
    from ..canary.dynamic.bisect import BisectOptions, run_bisect
    from ..catalog.bridge import read_catalog
    from ..report.describe.bisect import describe_bisect, describe_run

    static = tier is Tier.STATIC or (tier is None and not (target or overlays or axes))
    options = BisectOptions(
        good, bad, module, static, target, tuple(overlays or ()), python, tuple(axes or ()), repeat, seed, limit,
        answers,
    )  # fmt: skip
    result = run_bisect(read_catalog(matrix), options, lambda *run: write_error_line(describe_run(*run)))
    finish(result, describe_bisect, fmt, output)
