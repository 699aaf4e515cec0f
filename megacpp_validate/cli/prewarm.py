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
    seal: Annotated[bool, "Seal it when all is done."] = True,
    shared: Annotated[bool, "Seal so that any user may add files, as in an image."] = False,
    verify: Annotated[bool, "Verify the sealed cache, as `jit-verify` does."] = True,
) -> Result:
    """Compile what the presets and the probes need into the JIT caches of one architecture, seal and verify them.

    What is finished is not done again, also after a prewarm that was killed. Tasks for more devices than --ranks are
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
    if not verify or not result.sealed:
        return result
    verdict = run_verify(context.catalog, rows, read_unkept(context.matrix), options, None, context.receipts, say)
    return result.model_copy(update={"verdict": verdict})
