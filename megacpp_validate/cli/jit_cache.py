"""`jit-cache`: check, export, import, open."""

from pathlib import Path
from typing import Annotated, Literal

from .app import Context, Result, verb
from .options import Root

Action = Literal["check", "export", "import", "open"]


@verb("jit:describe_cache")
def jit_cache(
    context: Context,  # noqa: ARG001 - every verb has one
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
