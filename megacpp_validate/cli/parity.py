"""`parity`: the bridge modules against native PyTorch."""

from .app import Context, Result, fill, show_event, verb
from .options import Jobs, Probes, Target


@verb("session:describe_session", runs=("receipts", 300.0))
def parity(context: Context, target: Target, probes: Probes = (), jobs: Jobs = 0) -> Result:
    """Compare every bridge module with native PyTorch, on the backend that is requested.

    One process a module, forward and every gradient against an fp64 reference. MEGACPP_DISABLE_TE=1 requests the
    native paths.
    """
    from ..environments.host_session import SessionOptions, run_parity

    options = fill(SessionOptions, locals(), probes=probes or None)
    return run_parity(context.catalog, options, show_event)
