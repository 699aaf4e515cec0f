"""`te-bisect`: the first release, or library, that breaks a module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .app import Result, verb, write_error_line
from .options import Limit, Matrix, Overlays, Python, Seed


@verb("bisect:describe_bisect")
def te_bisect(
    good: Annotated[str, typer.Argument(metavar="GOOD", help="Release that is good.")],
    bad: Annotated[
        str, typer.Argument(metavar="BAD", help="Release that is bad; the same one where an --axis changes.")
    ],
    module: Annotated[str, typer.Option(help="Bridge module that breaks between them.")],
    tier: Annotated[
        Literal["static", "gpu"] | None,
        typer.Option(help="static: by sources, anywhere. gpu: by probes. Without it: gpu with a target or axis."),
    ] = None,
    target: Annotated[str, typer.Option(help="A row of matrix/targets.toml; of the gpu tier.")] = "",
    overlays: Overlays = None,
    python: Python = "",
    axes: Annotated[
        list[str] | None,
        typer.Option(
            "--axis", help="NAME=VALUE:DIR,VALUE:DIR: a site folder a value, from good to bad; may be repeated."
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of a point; one bad run makes the point bad.")] = 1,
    seed: Seed = 0,
    limit: Limit = 300.0,
    answers: Annotated[
        Path, typer.Option(help="Folder for receipts; a cell with a receipt there is not run again.")
    ] = Path(".megacpp/bisect"),
    matrix: Matrix = None,
) -> Result:
    """Which release is the first that breaks a module, and is it Transformer Engine at all?

    The search confirms both ends first. A release that cannot be built or imported is no bad release. With --axis
    (torch, cudnn, cublas, flash-attn, deep-gemm) the answer may be another component.
    """
    from ..canary.dynamic.bisect import BisectOptions, run_bisect
    from ..catalog.bridge import read_catalog
    from ..report.describe.bisect import describe_run

    static = tier == "static" or (tier is None and not (target or overlays or axes))
    options = BisectOptions(
        good, bad, module, static, target, tuple(overlays or ()), python, tuple(axes or ()), repeat, seed, limit,
        answers,
    )  # fmt: skip
    return run_bisect(read_catalog(matrix), options, lambda *run: write_error_line(describe_run(*run)))
