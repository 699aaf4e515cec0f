"""`moe-smoke`: the hybrid model trained on this machine."""

from typing import Annotated, Literal

import typer

from .app import Context, Result, fill, show_event, verb
from .options import Cells


@verb("session:describe_session", runs=("moe_smoke", 900.0))
def moe_smoke(
    context: Context,
    target: Annotated[str, "cpu, h200, b200; else the GPU that is here, or cpu."] = "",
    cells: Cells = (),
    ranks: Annotated[int, typer.Option(min=0, help="Only cells that take so many devices; 0: all.")] = 0,
    launcher: Annotated[Literal["local", "torchrun", "slurm"], "What starts the ranks."] = "local",
) -> Result:
    """Train the whole model, spread over ranks, and compare with one rank; report where the time goes.

    The cells are the rows of matrix/moe_smoke.toml. A cell that takes more GPUs than are here is not run, which is
    never good.
    """
    from ..environments.host_session import SessionOptions, run_smoke

    # One cell at a time: the ranks of a cell have the GPUs, or the cores, to themselves.
    options = fill(SessionOptions, locals(), probes=cells or None, jobs=1)
    return run_smoke(context.catalog, options, show_event, ranks=ranks, launcher=launcher)
