"""The verb of ablation: what each feature is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..app import MatrixOption, OutputOption, app
from ..told_options import PageFormat, PageFormatOption
from .session_options import PythonOption, ReceiptsOption, SeedOption


@app.command()
def ablate(
    features: Annotated[
        list[str], typer.Argument(help="feature=NAME: rows of matrix/postures.toml, with commas or repeated; or all.")
    ],
    size: Annotated[str, typer.Option("--size", help="Of the model: tiny, small, scaled.")] = "small",
    steps: Annotated[int, typer.Option(min=8, help="Of each run.")] = 40,
    pairs: Annotated[int, typer.Option(min=2, help="Runs of each arm, in turn.")] = 2,
    ranks: Annotated[int, typer.Option(min=0, help="Processes of a run; 0: as the plan says.")] = 0,
    plan: Annotated[str, typer.Option("--plan", help="As in data=4,expert_parallel=4.")] = "",
    device: Annotated[Literal["cuda", "cpu"], typer.Option("--device", help="Where to train.")] = "cuda",
    target: Annotated[str, typer.Option("--target", help="Whose FP8 recipes hold, on a GPU.")] = "h200",
    base: Annotated[
        Literal["posture", "plain", ""],
        typer.Option("--base", help="What both arms begin with; the posture on a GPU, else plain."),
    ] = "",
    again: Annotated[
        bool, typer.Option("--again", help="Judge the receipts that are there by today's rules, and run nothing.")
    ] = False,
    seed: SeedOption = 0,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one run may take.")] = 900.0,
    receipts: ReceiptsOption = Path(".megacpp/ablation"),
    python: PythonOption = "",
    fmt: PageFormatOption = PageFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """What does a feature change: step time, tokens a second, memory, loss? A win, a tax, or noise?

    Matched pairs of runs without it and with it take turns, same seed and steps. Exit code 0: every feature was judged.
    2: arguments or the matrix are wrong. 4: a run failed, or did not run on what was asked for.
    """
    from .ablate_runs import run_ablation

    cuda = device == "cuda"
    asked = {
        "size": size, "steps": steps, "pairs": pairs, "seed": seed, "plan": plan, "ranks": ranks, "device": device,
        "target": target if cuda else "cpu", "base": base or ("posture" if cuda else "plain"), "limit_s": limit,
        "receipts": receipts, "python": python,
    }  # fmt: skip
    run_ablation(matrix, features, asked, again, fmt, output)
