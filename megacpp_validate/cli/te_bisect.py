"""`te-bisect`: the first release, or library, that breaks a module."""

from typing import Annotated, Literal

import typer

from .app import Context, Result, fill, say, verb
from .options import Overlays


@verb("canary:describe_bisect", runs=("bisect", 300.0))
def te_bisect(
    context: Context,
    good: Annotated[str, "Release that is good."],
    bad: Annotated[str, "Release that is bad; the same one where an --axis changes."],
    /,
    module: Annotated[str, "Bridge module that breaks between them."],
    tier: Annotated[
        Literal["static", "gpu"] | None, "static: by sources. gpu: by probes. Without it: gpu with a target or axis."
    ] = None,
    target: Annotated[str, "A row of matrix/targets.toml; of the gpu tier."] = "",
    overlays: Overlays = (),
    axes: Annotated[
        tuple[str, ...],
        typer.Option("--axis", help="NAME=VALUE:DIR,VALUE:DIR: a site folder a value, from good to bad; repeated."),
    ] = (),
) -> Result:
    """Which release is the first that breaks a module, and is it Transformer Engine at all?

    The search confirms both ends first. A release that cannot be built or imported is no bad release. With --axis
    (torch, cudnn, cublas, flash-attn, deep-gemm) the answer may be another component.
    """
    from ..canary.dynamic.bisect import BisectOptions, run_bisect
    from ..report.describe.canary import describe_run

    static = tier == "static" or (tier is None and not (target or overlays or axes))
    options = fill(BisectOptions, locals(), answers=context.receipts)
    return run_bisect(context.catalog, options, lambda *run: say(describe_run(*run)))
