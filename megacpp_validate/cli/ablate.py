"""`ablate`: what each feature is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .app import Format, FormatOption, MatrixOption, OutputOption, app, write_error_line


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
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of everything that is drawn.")] = 0,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one run may take.")] = 900.0,
    receipts: Annotated[Path, typer.Option("--receipts", help="Folder for receipts and logs.")] = Path(
        ".megacpp/ablation"
    ),
    python: Annotated[str, typer.Option("--python", help="Interpreter of the stack; default: the host's.")] = "",
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Measure what a feature changes: step time, tokens a second, memory, loss; a win, a tax, or noise.

    Matched pairs of runs without the feature and with it take turns, same seed and steps. Exit code 0: every feature
    was judged. 2: arguments or the matrix are wrong. 4: a run failed, or did not run on what was requested.
    """
    from ..catalog.postures import read_postures
    from ..evidence.whole_file import write_whole
    from ..gate.ablation_runs import AblationOptions, read_features, read_plan, run_ablation
    from ..report.describe.ablation import describe_ablation
    from ..report.render.markdown import render_markdown
    from .output import finish

    posture, cuda = read_postures(matrix), device == "cuda"
    options = AblationOptions(
        features=read_features(features, posture), size=size, steps=steps, pairs=pairs, seed=seed,
        plan=read_plan(plan, ranks), device=device, target=target if cuda else "cpu",
        base=base or ("posture" if cuda else "plain"), limit_s=limit, receipts=receipts, python=python,
    )  # fmt: skip
    result = run_ablation(posture, options, write_error_line)
    write_whole(receipts / "ablation.md", render_markdown(describe_ablation(result)))
    finish(result, describe_ablation, fmt, output)
