"""`prewarm`: JIT caches filled ahead of time, sealed and verified."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .app import Result, split_names, verb, write_error_line
from .options import AtBuild, Jobs, Limit, Matrix, Python, Ranks, Receipts, Root, Seed, Target, Tasks


@verb("jit:describe_prewarm", verbose="List every kernel and shape that was compiled.")
def prewarm(
    target: Target,
    root: Root = None,
    python: Python = "",
    at_build: AtBuild = False,
    tasks: Tasks = None,
    jobs: Jobs = 0,
    ranks: Ranks = 1,
    mode: Annotated[
        Literal["nvcc", "nvrtc"], typer.Option(help="What compiles DeepGEMM's kernels; part of their keys.")
    ] = "nvcc",
    reopen: Annotated[bool, typer.Option("--reopen", help="Continue in a sealed cache, and seal it again.")] = False,
    seal: Annotated[bool, typer.Option(help="Seal it when all is done.")] = True,
    shared: Annotated[
        bool, typer.Option("--shared", help="Seal so that any user may add files, as in an image.")
    ] = False,
    verify: Annotated[bool, typer.Option(help="Verify the sealed cache, as `jit-verify` does.")] = True,
    receipts: Receipts = Path(".megacpp/jit_verify"),
    seed: Seed = 0,
    limit: Limit = 900.0,
    matrix: Matrix = None,
) -> Result:
    """Compile what the presets and the probes need into the JIT caches of one architecture, seal and verify them.

    What is finished is not done again, also after a prewarm that was killed. Tasks for more devices than --ranks are
    listed as left out. Exit code 0: all others are done, sealed and warm, 1: a task failed, or what was sealed was
    changed or is not warm, 2: another architecture's folder, or one that cannot be written, 4: a task did not run,
    6: a full disk.
    """
    from ..catalog.bridge import read_catalog
    from ..catalog.prewarm import read_prewarm, read_unkept
    from ..jitcache.prewarm import SealOptions, run_prewarm
    from ..jitcache.stack import JitOptions
    from ..jitcache.verify import run_prewarm_and_verify

    catalog, names = read_catalog(matrix), split_names(tasks) or None
    options = JitOptions(target, names, root, python, mode, ranks, jobs, at_build, seed, limit)
    sealing = SealOptions(reopen, seal, shared)
    rows = read_prewarm(catalog, matrix)
    if not verify:
        return run_prewarm(catalog, rows, options, sealing, write_error_line)
    unkept = read_unkept(matrix)
    return run_prewarm_and_verify(catalog, rows, unkept, options, sealing, receipts, write_error_line)
