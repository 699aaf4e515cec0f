"""`smoke-faults`: whether planted faults between ranks are seen, and named."""

from typing import Annotated

import typer

from .app import Context, Result, fill, show_event, verb
from .options import Faults, Target


@verb("scores:describe_planted", runs=("smoke_faults", 900.0))
def smoke_faults(
    context: Context,
    target: Target = "cpu",
    faults: Faults = (),
    jobs: Annotated[int, typer.Option(min=1, max=2, help="Cells at a time, each of 2 or 4 ranks.")] = 2,
) -> Result:
    """Is what goes wrong between ranks caught, and named? Faults are planted in real runs of tiny models.

    Each must be seen by its own check, which must name the place: step, rank, module. Runs without a fault must stay
    green. The rows are in matrix/smoke_faults.toml.
    """
    from ..canary.dynamic.planting import run_smoke_faults
    from ..catalog.planted import read_smoke_faults
    from ..environments.host_session import SessionOptions

    options = fill(SessionOptions, locals(), probes=None)
    known = read_smoke_faults((row.id for row in context.catalog.targets), context.matrix)
    return run_smoke_faults(context.catalog, known, faults, options, show_event)
