"""`jit-cache`: check, seal, unseal, export, import, open."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .app import Result, verb
from .options import Matrix, Python, Root

Action = Literal["check", "seal", "unseal", "export", "import", "open"]


@verb("jit:describe_cache")
def jit_cache(
    action: Annotated[Action, typer.Argument(help="What is done with the cache.")],
    place: Annotated[
        Path | None,
        typer.Argument(help="Archive (.tar, .tar.gz, .tar.zst) to export or import; or ROOT/ARCH to import."),
    ] = None,
    root: Root = None,
    arch: Annotated[str, typer.Option(help="Of the cache: sm_90a; else the only one below the root.")] = "",
    work: Annotated[Path | None, typer.Option(help="open: root of the working copy.")] = None,
    prefix: Annotated[str, typer.Option(help="export: path before ARCH in the archive, for a layer.")] = "",
    replace: Annotated[bool, typer.Option("--replace", help="import: replace another cache there.")] = False,
    any_stack: Annotated[
        bool, typer.Option("--any-stack", help="import: do not compare the cache with the stack that is here.")
    ] = False,
    shared: Annotated[
        bool, typer.Option("--shared", help="seal: any user may add files beside the sealed ones.")
    ] = False,
    python: Python = "",
    matrix: Matrix = None,
) -> Result:
    """Carry a JIT cache from machine to machine, whole and unchanged, and use it where its folder cannot be written.

    Every action compares each file with its hash. Exit code 0: done, 1: the cache was changed or is of another stack,
    2: a refused archive or folder, 4: no cache with a manifest, 5: no interpreter, 6: a full disk.
    """
    from ..catalog.bridge import read_catalog
    from ..jitcache.stack import JitOptions
    from ..jitcache.transfer import CacheOptions, run_cache

    options = CacheOptions(action, place, arch, work, prefix, replace, any_stack, shared)
    return run_cache(read_catalog(matrix), JitOptions(root=root, python=python), options)
