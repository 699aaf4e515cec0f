"""`jit-verify`: whether a sealed cache leaves nothing to compile."""

from pathlib import Path
from typing import Annotated

from .app import Context, Result, fill, say, verb
from .options import AtBuild, Jobs, Ranks, Root, Target, Tasks


@verb("jit:describe_verify", runs=("jit_verify", 900.0))
def jit_verify(
    context: Context,
    target: Target,
    root: Root = None,
    at_build: AtBuild = False,
    tasks: Tasks = (),
    jobs: Jobs = 0,
    ranks: Ranks = 1,
    work: Annotated[Path | None, "Folder for the working copy; else that for temporary files."] = None,
) -> Result:
    """Verify that a sealed JIT cache is warm: probes and the small smoke run on a copy of it trigger no compilation.

    Every file is compared with its hash first, and the cache with the stack. With --at-build, what was compiled without
    a GPU is looked for without one. Exit code 0: warm, 1: something was compiled, failed, or was changed since it was
    sealed, or the cache is of another stack, 4: something did not run.
    """
    from ..catalog.prewarm import read_prewarm, read_unkept
    from ..jitcache.stack import JitOptions
    from ..jitcache.verify import run_verify

    options = fill(JitOptions, locals(), tasks=tasks or None)
    rows, unkept = read_prewarm(context.catalog, context.matrix), read_unkept(context.matrix)
    return run_verify(context.catalog, rows, unkept, options, work, context.receipts, say)
