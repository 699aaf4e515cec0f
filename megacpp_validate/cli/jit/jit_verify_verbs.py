"""The verb that proves a sealed cache warm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..app import Format, MatrixOption, OutputOption, app, split_names
from ..sessions.session_options import PythonOption, SeedOption
from ..told_options import PlainFormat, PlainFormatOption
from .prewarm_verbs import AtBuildOption, KernelsOption, RanksOption, RootOption, TargetOption, TasksOption


@app.command()
def jit_verify(
    target: TargetOption,
    root: RootOption = None,
    python: PythonOption = "",
    at_build: AtBuildOption = False,
    tasks: TasksOption = None,
    jobs: Annotated[int, typer.Option(min=0, help="Processes at a time; 0: one a core, 8 at most.")] = 0,
    ranks: RanksOption = 1,
    work: Annotated[
        Path | None, typer.Option("--work", help="Folder for the working copy; else that for temporary files.")
    ] = None,
    receipts: Annotated[Path, typer.Option("--receipts", help="Folder for the verdict, receipts and logs.")] = Path(
        ".megacpp/jit_verify"
    ),
    seed: SeedOption = 0,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one task may take.")] = 900.0,
    verbose: KernelsOption = False,
    fmt: PlainFormatOption = PlainFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Is a sealed JIT cache warm? The probes and the small smoke run on a copy of it, and nothing may be compiled.

    Every file is held to its hash first, and the cache to the stack. With --at-build, what was compiled without a GPU
    is looked for without one. Exit code 0: warm, 1: something was compiled, failed, or was changed since it was sealed,
    or the cache is of another stack, 4: something did not run.
    """
    from .jit_stack import AskedJit
    from .jit_verify_runs import Folders, run_jit_verify

    names = None if tasks is None else split_names(tasks)
    asked = AskedJit(target, names, root, python, "", ranks, jobs, seed, limit)
    run_jit_verify(matrix, asked, Folders(work, receipts), Format(fmt), output, at_build=at_build, verbose=verbose)
