"""`prewarm`: JIT caches filled ahead of time."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from .app import Result, split_names, verb, write_error_line
from .options import AtBuild, Jobs, Limit, Matrix, Python, Ranks, Root, Seed, Target, Tasks


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
    seed: Seed = 0,
    limit: Limit = 900.0,
    matrix: Matrix = None,
) -> Result:
    """Compile what the presets and the probes need into the JIT caches of one architecture, and seal them.

    What is finished is not done again, also after a prewarm that was killed. Exit code 0: all is done, 1: a task
    failed, or what was sealed was changed, 2: another architecture's folder, or one that cannot be written, 4: a task
    did not run, 6: a full disk.
    """
    from ..catalog.bridge import read_catalog
    from ..catalog.prewarm import read_prewarm
    from ..jitcache.prewarm import SealOptions, run_prewarm
    from ..jitcache.stack import JitOptions

    catalog, names = read_catalog(matrix), split_names(tasks) or None
    options = JitOptions(target, names, root, python, mode, ranks, jobs, at_build, seed, limit)
    sealing = SealOptions(reopen, seal, shared)
    return run_prewarm(catalog, read_prewarm(catalog, matrix), options, sealing, write_error_line)
