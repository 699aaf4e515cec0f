"""`prewarm`: JIT caches filled ahead of time, sealed and verified."""

from typing import Annotated, Literal

from .app import Context, Result, fill, say, verb
from .options import AtBuild, Jobs, Ranks, Root, Target, Tasks


@verb("jit:describe_prewarm", runs=("jit_verify", 900.0))
def prewarm(
    context: Context,
    target: Target,
    root: Root = None,
    at_build: AtBuild = False,
    tasks: Tasks = (),
    jobs: Jobs = 0,
    ranks: Ranks = 1,
    mode: Annotated[Literal["nvcc", "nvrtc"], "What compiles DeepGEMM's kernels; part of their keys."] = "nvcc",
) -> Result:
    """Compile what the presets and the probes need into the JIT caches of one architecture, seal and verify them.

    A prewarm that was killed continues; a sealed cache is verified again. Tasks for more devices than --ranks are
    listed as left out. Exit code 0: all others are done, sealed and warm, 1: a task failed, or what was sealed was
    changed or is not warm, 2: another architecture's folder, or one that cannot be written, 4: a task did not run,
    6: a full disk.
    """
    from ..catalog.prewarm import read_prewarm, read_unkept
    from ..jitcache.prewarm import run_prewarm
    from ..jitcache.stack import JitOptions
    from ..jitcache.verify import run_verify

    options, rows = fill(JitOptions, locals(), tasks=tasks or None), read_prewarm(context.catalog, context.matrix)
    result = run_prewarm(context.catalog, rows, options, say)
    if not result.sealed:
        return result
    verdict = run_verify(context.catalog, rows, read_unkept(context.matrix), options, None, context.receipts, say)
    return result.model_copy(update={"verdict": verdict})
