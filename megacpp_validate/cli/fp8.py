"""`fp8`: recipes, ownership, backends and the loss gate on one machine."""

from __future__ import annotations

from pathlib import Path

from .app import Result, split_names, verb
from .options import Jobs, Limit, Matrix, Probes, Python, Receipts, Seed, Target


@verb("session:describe_session", verbose="List every check with its bounds.")
def fp8(
    target: Target = "h200",
    probes: Probes = None,
    seed: Seed = 0,
    jobs: Jobs = 0,
    limit: Limit = 300.0,
    receipts: Receipts = Path(".megacpp/fp8"),
    python: Python = "",
    matrix: Matrix = None,
) -> Result:
    """Check FP8 recipes, their state and owners, and whether training in FP8 follows BF16.

    The cells are the rows of matrix/fp8.toml; those that train have a limit of their own there. A recipe that the
    target lacks must be refused there, which is good.
    """
    from ..catalog.bridge import read_catalog
    from ..environments.host_session import SessionOptions
    from ..gate.fp8_session import run_fp8
    from .progress import Progress

    options = SessionOptions(target, split_names(probes) or None, seed, jobs, limit, receipts, python)
    with Progress() as progress:
        return run_fp8(read_catalog(matrix), matrix, options, progress.show_cell)
