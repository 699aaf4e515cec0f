"""`parity`: the bridge modules against native PyTorch."""

from __future__ import annotations

from pathlib import Path

from .app import Result, split_names, verb
from .options import Jobs, Limit, Matrix, Probes, Python, Receipts, Seed, Target


@verb("session:describe_session", verbose="List every check with its bounds.")
def parity(
    target: Target,
    probes: Probes = None,
    seed: Seed = 0,
    jobs: Jobs = 0,
    limit: Limit = 300.0,
    receipts: Receipts = Path(".megacpp/receipts"),
    python: Python = "",
    matrix: Matrix = None,
) -> Result:
    """Compare every bridge module with native PyTorch, on the backend that is requested.

    One process a module, forward and every gradient against an fp64 reference. MEGACPP_DISABLE_TE=1 requests the
    native paths.
    """
    from ..catalog.bridge import read_catalog
    from ..environments.host_session import SessionOptions, run_parity
    from .progress import Progress

    options = SessionOptions(target, split_names(probes) or None, seed, jobs, limit, receipts, python)
    with Progress() as progress:
        return run_parity(read_catalog(matrix), options, progress.show_cell)
