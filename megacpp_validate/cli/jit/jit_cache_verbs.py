"""The verb that handles sealed caches: check, seal, export, import, open."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..app import Format, MatrixOption, OutputOption, app
from ..sessions.session_options import PythonOption
from ..told_options import PlainFormat, PlainFormatOption
from .prewarm_verbs import RootOption


class Deed(StrEnum):
    """What is done with a cache."""

    CHECK = "check"
    SEAL = "seal"
    UNSEAL = "unseal"
    EXPORT = "export"
    IMPORT = "import"
    OPEN = "open"


@app.command()
def jit_cache(
    deed: Annotated[Deed, typer.Argument(help="check, seal, unseal, export, import or open.")],
    place: Annotated[
        Path | None, typer.Argument(help="Archive (.tar, .tar.gz, .tar.zst) or folder to export to, or to import.")
    ] = None,
    root: RootOption = None,
    arch: Annotated[str, typer.Option("--arch", help="Of the cache: sm_90a; else the only one below the root.")] = "",
    work: Annotated[Path | None, typer.Option("--work", help="open: root of the working copy.")] = None,
    prefix: Annotated[str, typer.Option(help="export: path before ARCH in the archive, for a layer.")] = "",
    replace: Annotated[bool, typer.Option("--replace", help="import: another cache there makes room.")] = False,
    any_stack: Annotated[
        bool, typer.Option("--any-stack", help="import: do not ask whether it fits the stack that is here.")
    ] = False,
    shared: Annotated[
        bool, typer.Option("--shared", help="seal: any user may add files beside the sealed ones.")
    ] = False,
    python: PythonOption = "",
    fmt: PlainFormatOption = PlainFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Carry a JIT cache from machine to machine, whole and unchanged, and use it where its folder cannot be written.

    Every deed holds each file to its hash. Exit code 0: done, 1: the cache was changed or is of another stack, 2: a
    refused archive or folder, 4: no cache with a manifest, 5: no interpreter, 6: a full disk.
    """
    from .jit_cache_runs import AskedCache, run_jit_cache

    asked = AskedCache(deed.value, place, root, arch, work, prefix, replace, any_stack, shared, python)
    run_jit_cache(matrix, asked, Format(fmt), output)
