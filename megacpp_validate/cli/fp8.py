"""`fp8`: recipes, ownership, backends and the loss gate on one machine."""

from .app import Context, Result, fill, show_event, verb
from .options import Jobs, Probes, Target


@verb("session:describe_session", runs=("fp8", 300.0))
def fp8(context: Context, target: Target = "h200", probes: Probes = (), jobs: Jobs = 0) -> Result:
    """Check FP8 recipes, their state and owners, and whether training in FP8 follows BF16.

    The cells are the rows of matrix/fp8.toml; those that train have a limit of their own there. A recipe that the
    target lacks must be refused there, which is good.
    """
    from ..environments.host_session import SessionOptions
    from ..gate.fp8 import run_fp8

    return run_fp8(context.catalog, context.matrix, fill(SessionOptions, locals(), probes=probes or None), show_event)
