"""JIT caches: filled, verified, and carried."""

from __future__ import annotations

from pathlib import Path
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
    compile_only: Annotated[bool, "Only whether what needs no GPU compiles, on any machine; keep nothing."] = False,
) -> Result:
    """Compile what the presets and the probes need into the JIT caches of one architecture, seal and verify them.

    A sealed cache is verified again. Tasks for more devices than --ranks are
    listed as left out. Exit code 0: all others are done, sealed and warm, 1: a task failed, or what was sealed was
    changed or is not warm, 2: another architecture's folder, or one that cannot be written, 4: a task did not run
    (what was done is sealed and verified), 6: a full disk.
    """
    from ..catalog.prewarm import read_prewarm
    from ..jitcache.prewarm import run_prewarm
    from ..jitcache.stack import JitOptions
    from ..jitcache.verify import run_verify

    options, rows = fill(JitOptions, locals()), read_prewarm(context.catalog)
    result = run_prewarm(context.catalog, rows, options, say)
    if not result.sealed:
        return result
    verdict = run_verify(context.catalog, rows, options, context.receipts, say)
    return result.model_copy(update={"verdict": verdict})


@verb("jit:describe_verify", runs=("jit_verify", 900.0))
def jit_verify(
    context: Context,
    target: Target,
    root: Root = None,
    at_build: AtBuild = False,
    tasks: Tasks = (),
    jobs: Jobs = 0,
    ranks: Ranks = 1,
) -> Result:
    """Verify that a sealed JIT cache is warm: probes and the small smoke run on a copy of it trigger no compilation.

    Every file is compared with its hash first, and the cache with the stack. With --at-build, what was compiled without
    a GPU is looked for without one. Exit code 0: warm, 1: something was compiled, failed, or was changed since it was
    sealed, or the cache is of another stack, 4: something did not run.
    """
    from ..catalog.prewarm import read_prewarm
    from ..jitcache.stack import JitOptions
    from ..jitcache.verify import run_verify

    options = fill(JitOptions, locals())
    return run_verify(context.catalog, read_prewarm(context.catalog), options, context.receipts, say)


Action = Literal["check", "export", "import", "open"]


@verb("jit:describe_cache")
def jit_cache(
    action: Annotated[Action, "What is done with the cache."],
    place: Annotated[Path | None, "Archive (.tar, .tar.gz) to export or import."] = None,
    /,
    root: Root = None,
    arch: Annotated[str, "Of the cache: sm_90a; else the only one below the root."] = "",
    work: Annotated[Path | None, "open: root of the working copy."] = None,
) -> Result:
    """Carry a JIT cache from machine to machine, whole and unchanged, and use it where its folder cannot be written.

    Every action compares each file with its hash. Exit code 0: done, 1: the cache was changed, 2: a refused archive or
    folder, 4: no cache with a manifest, 6: a full disk. `jit-verify` compares the cache with the stack.
    """
    from ..jitcache.cache import run_cache
    from ..jitcache.stack import find_root

    return run_cache(find_root(root), action, place, arch=arch, work=work)
