"""`blame-score`: whether planted faults of Transformer Engine are blamed on the right module."""

from typing import Annotated

import typer

from .app import Context, Result, fill, show_event, verb
from .options import Copies, Faults, Jobs, Overlays, Release, Target


@verb("scores:describe_planted", runs=("blame-score", 300.0))
def blame_score(
    context: Context,
    faults: Faults = (),
    release: Release = "",
    clean: Annotated[int, typer.Option(min=0, help="Copies without a fault.")] = 6,
    target: Target = "h200",
    overlays: Overlays = (),
    copies: Copies = None,
    jobs: Jobs = 0,
) -> Result:
    """Is the right module blamed? Faults are planted in copies of Transformer Engine, and every probe is run on each.

    Started again, it runs what has no receipt yet.
    """
    from ..canary.dynamic.planting import PlantOptions, run_planted

    return run_planted(context.catalog, "blame-score", fill(PlantOptions, locals()), show_event)
