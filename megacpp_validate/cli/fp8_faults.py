"""`fp8-faults`: whether planted faults of the low-precision stack are seen by the right checks."""

from typing import Annotated

from .app import Context, Result, fill, show_event, verb
from .options import Copies, Faults, Jobs, Overlays, Release, Target


@verb("scores:describe_planted", runs=("fp8-faults", 300.0))
def fp8_faults(
    context: Context,
    faults: Faults = (),
    release: Release = "",
    held_out: Annotated[bool, "Those that were chosen before any check was written."] = False,
    target: Target = "h200",
    overlays: Overlays = (),
    copies: Copies = None,
    jobs: Jobs = 0,
) -> Result:
    """Does the right check see it? Faults are planted in copies of Transformer Engine; the cells of FP8 run on each.

    Of each fault the cells that must turn red run, and one that must stay green. Started again, it runs what has no
    receipt yet.
    """
    from ..canary.dynamic.planting import PlantOptions, run_planted

    return run_planted(context.catalog, "fp8-faults", fill(PlantOptions, locals()), show_event)
