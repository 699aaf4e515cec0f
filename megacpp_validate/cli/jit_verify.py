"""The verb `jit-verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import (
    Format,
    FormatOption,
    MatrixOption,
    OutputOption,
    PythonOption,
    SeedOption,
    app,
    split_names,
    write_error_line,
)
from .prewarm import (
    AtBuildOption,
    JobsOption,
    KernelsOption,
    LimitOption,
    RanksOption,
    RootOption,
    TargetOption,
    TasksOption,
)


@app.command()
def jit_verify(
    target: TargetOption,
    root: RootOption = None,
    python: PythonOption = "",
    at_build: AtBuildOption = False,
    tasks: TasksOption = None,
    jobs: JobsOption = 0,
    ranks: RanksOption = 1,
    work: Annotated[
        Path | None, typer.Option("--work", help="Folder for the working copy; else that for temporary files.")
    ] = None,
    receipts: Annotated[Path, typer.Option("--receipts", help="Folder for the verdict, receipts and logs.")] = Path(
        ".megacpp/jit_verify"
    ),
    seed: SeedOption = 0,
    limit: LimitOption = 900.0,
    verbose: KernelsOption = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Verify that a sealed JIT cache is warm: probes and the small smoke run on a copy of it trigger no compilation.

    Every file is compared with its hash first, and the cache with the stack. With --at-build, what was compiled without
    a GPU is looked for without one. Exit code 0: warm, 1: something was compiled, failed, or was changed since it was
    sealed, or the cache is of another stack, 4: something did not run.
    """
    from ..catalog.bridge import read_catalog
    from ..catalog.prewarm import read_prewarm, read_unkept
    from ..jitcache.stack import JitOptions
    from ..jitcache.verify import run_verify
    from ..report.describe.jit import describe_verify
    from .output import finish

    catalog = read_catalog(matrix)
    rows, unkept = read_prewarm(catalog, matrix), read_unkept(matrix)
    names = None if tasks is None else split_names(tasks)
    options = JitOptions(target, names, root, python, "", ranks, jobs, at_build, seed, limit)
    result = run_verify(catalog, rows, unkept, options, work, receipts, write_error_line)
    finish(result, describe_verify, fmt, output, verbose=verbose)
