"""`jit-cache`: check, seal, unseal, export, import, open."""

from pathlib import Path
from typing import Annotated, Literal

from .app import Context, Python, Result, fill, verb
from .options import Root

Action = Literal["check", "seal", "unseal", "export", "import", "open"]


@verb("jit:describe_cache")
def jit_cache(
    context: Context,
    action: Annotated[Action, "What is done with the cache."],
    place: Annotated[
        Path | None, "Archive (.tar, .tar.gz, .tar.zst) to export or import; or ROOT/ARCH to import."
    ] = None,
    /,
    root: Root = None,
    arch: Annotated[str, "Of the cache: sm_90a; else the only one below the root."] = "",
    work: Annotated[Path | None, "open: root of the working copy."] = None,
    prefix: Annotated[str, "export: path before ARCH in the archive, for a layer."] = "",
    replace: Annotated[bool, "import: replace another cache there."] = False,
    any_stack: Annotated[bool, "import: do not compare the cache with the stack that is here."] = False,
    shared: Annotated[bool, "seal: any user may add files beside the sealed ones."] = False,
    python: Python = "",
) -> Result:
    """Carry a JIT cache from machine to machine, whole and unchanged, and use it where its folder cannot be written.

    Every action compares each file with its hash. Exit code 0: done, 1: the cache was changed or is of another stack,
    2: a refused archive or folder, 4: no cache with a manifest, 5: no interpreter, 6: a full disk.
    """
    from ..jitcache.stack import JitOptions
    from ..jitcache.transfer import CacheOptions, run_cache

    options = fill(CacheOptions, locals())
    return run_cache(context.catalog, JitOptions(root=root, python=python), options)
