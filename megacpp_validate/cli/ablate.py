"""`ablate`: what each feature is worth."""

from typing import Annotated, Literal

import typer

from .app import Context, Result, fill, say, verb


@verb("scores:describe_ablation", runs=("ablation", 900.0))
def ablate(
    context: Context,
    features: Annotated[
        tuple[str, ...], "feature=NAME: rows of matrix/postures.toml, repeated or with commas; or all."
    ],
    /,
    size: Annotated[str, "Of the model: tiny, small, scaled."] = "small",
    steps: Annotated[int, typer.Option(min=8, help="Of each run.")] = 40,
    pairs: Annotated[int, typer.Option(min=2, help="Runs of each arm, in turn.")] = 2,
    device: Annotated[Literal["cuda", "cpu"], "Where to train."] = "cuda",
    target: Annotated[str, "Whose FP8 recipes hold, on a GPU."] = "h200",
    base: Annotated[Literal["posture", "plain", ""], "What both arms begin with; the posture on a GPU."] = "",
) -> Result:
    """Measure what a feature changes: step time, tokens a second, memory, loss; a win, a tax, or noise.

    Matched pairs of runs without the feature and with it take turns, same seed and steps. Exit code 0: every feature
    was judged. 2: arguments or the matrix are wrong. 4: a run failed, or did not run on what was requested.
    """
    from ..catalog.postures import read_postures
    from ..gate.ablation import AblationOptions, read_features, run_ablation
    from .output import write_result

    posture, on_gpu = read_postures(context.matrix), device == "cuda"
    options = fill(
        AblationOptions, locals(), features=read_features(list(features), posture),
        target=target if on_gpu else "cpu", base=base or ("posture" if on_gpu else "plain"),
    )  # fmt: skip
    result = run_ablation(posture, options, say)
    write_result(result, "scores:describe_ablation", context.receipts / "ablation.md", fmt="markdown")
    return result
