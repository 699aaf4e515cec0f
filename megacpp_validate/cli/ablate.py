"""`ablate`: what each feature is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .app import Format, Result, verb, write_error_line
from .options import Limit, Matrix, Python, Receipts, Seed


@verb("ablation:describe_ablation")
def ablate(
    features: Annotated[
        list[str], typer.Argument(help="feature=NAME: rows of matrix/postures.toml, with commas or repeated; or all.")
    ],
    size: Annotated[str, typer.Option(help="Of the model: tiny, small, scaled.")] = "small",
    steps: Annotated[int, typer.Option(min=8, help="Of each run.")] = 40,
    pairs: Annotated[int, typer.Option(min=2, help="Runs of each arm, in turn.")] = 2,
    ranks: Annotated[int, typer.Option(min=0, help="Processes of a run; 0: as the plan says.")] = 0,
    plan: Annotated[str, typer.Option(help="As in data=4,expert_parallel=4.")] = "",
    device: Annotated[Literal["cuda", "cpu"], typer.Option(help="Where to train.")] = "cuda",
    target: Annotated[str, typer.Option(help="Whose FP8 recipes hold, on a GPU.")] = "h200",
    base: Annotated[
        Literal["posture", "plain", ""],
        typer.Option(help="What both arms begin with; the posture on a GPU, else plain."),
    ] = "",
    seed: Seed = 0,
    limit: Limit = 900.0,
    receipts: Receipts = Path(".megacpp/ablation"),
    python: Python = "",
    matrix: Matrix = None,
) -> Result:
    """Measure what a feature changes: step time, tokens a second, memory, loss; a win, a tax, or noise.

    Matched pairs of runs without the feature and with it take turns, same seed and steps. Exit code 0: every feature
    was judged. 2: arguments or the matrix are wrong. 4: a run failed, or did not run on what was requested.
    """
    from ..catalog.postures import read_postures
    from ..gate.ablation_runs import AblationOptions, read_features, read_plan, run_ablation
    from .output import write_result

    posture, cuda = read_postures(matrix), device == "cuda"
    options = AblationOptions(
        features=read_features(features, posture), size=size, steps=steps, pairs=pairs, seed=seed,
        plan=read_plan(plan, ranks), device=device, target=target if cuda else "cpu",
        base=base or ("posture" if cuda else "plain"), limit_s=limit, receipts=receipts, python=python,
    )  # fmt: skip
    result = run_ablation(posture, options, write_error_line)
    write_result(result, "ablation:describe_ablation", receipts / "ablation.md", fmt=Format.MARKDOWN)
    return result
