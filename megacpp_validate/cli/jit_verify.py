"""`jit-verify`: whether a sealed cache leaves nothing to compile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import Result, split_names, verb, write_error_line
from .options import AtBuild, Jobs, Limit, Matrix, Python, Ranks, Receipts, Root, Seed, Target, Tasks


@verb("jit:describe_verify", verbose="List every kernel and shape that was compiled.")
def jit_verify(
    target: Target,
    root: Root = None,
    python: Python = "",
    at_build: AtBuild = False,
    tasks: Tasks = None,
    jobs: Jobs = 0,
    ranks: Ranks = 1,
    work: Annotated[
        Path | None, typer.Option(help="Folder for the working copy; else that for temporary files.")
    ] = None,
    receipts: Receipts = Path(".megacpp/jit_verify"),
    seed: Seed = 0,
    limit: Limit = 900.0,
    matrix: Matrix = None,
) -> Result:
    """Verify that a sealed JIT cache is warm: probes and the small smoke run on a copy of it trigger no compilation.

    Every file is compared with its hash first, and the cache with the stack. With --at-build, what was compiled without
    a GPU is looked for without one. Exit code 0: warm, 1: something was compiled, failed, or was changed since it was
    sealed, or the cache is of another stack, 4: something did not run.
    """
    from ..catalog.bridge import read_catalog
    from ..catalog.prewarm import read_prewarm, read_unkept
    from ..jitcache.stack import JitOptions
    from ..jitcache.verify import run_verify

    catalog, names = read_catalog(matrix), split_names(tasks) or None
    rows, unkept = read_prewarm(catalog, matrix), read_unkept(matrix)
    options = JitOptions(target, names, root, python, "", ranks, jobs, at_build, seed, limit)
    return run_verify(catalog, rows, unkept, options, work, receipts, write_error_line)
