"""The verb `prewarm`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

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

# Shared by the verbs of the JIT caches.
RootOption = Annotated[
    Path | None, typer.Option("--root", help="Root of the JIT caches; else MEGACPP_JIT_ROOT, else .megacpp/jit.")
]
TargetOption = Annotated[str, typer.Option("--target", help="A row of matrix/targets.toml: h200, b200, gb10, cpu.")]
TasksOption = Annotated[
    list[str] | None, typer.Option("--tasks", help="Rows of matrix/prewarm.toml, with commas or repeated; else all.")
]
AtBuildOption = Annotated[bool, typer.Option("--at-build", help="Only what needs no GPU, as when an image is built.")]
JobsOption = Annotated[int, typer.Option("--jobs", min=0, help="Processes at a time; 0: one a core, 8 at most.")]
RanksOption = Annotated[int, typer.Option("--ranks", min=1, help="Take cells of up to so many devices, too.")]
LimitOption = Annotated[float, typer.Option("--limit", min=1, help="Seconds that one task may take.")]
KernelsOption = Annotated[bool, typer.Option("--verbose", help="List every kernel and shape that was compiled.")]


@app.command()
def prewarm(
    target: TargetOption,
    root: RootOption = None,
    python: PythonOption = "",
    at_build: AtBuildOption = False,
    tasks: TasksOption = None,
    jobs: JobsOption = 0,
    ranks: RanksOption = 1,
    mode: Annotated[
        Literal["nvcc", "nvrtc"], typer.Option("--mode", help="What compiles DeepGEMM's kernels; part of their keys.")
    ] = "nvcc",
    reopen: Annotated[bool, typer.Option("--reopen", help="Continue in a sealed cache, and seal it again.")] = False,
    seal: Annotated[bool, typer.Option("--seal/--no-seal", help="Seal it when all is done.")] = True,
    shared: Annotated[
        bool, typer.Option("--shared", help="Seal so that any user may add files, as in an image.")
    ] = False,
    seed: SeedOption = 0,
    limit: LimitOption = 900.0,
    verbose: KernelsOption = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Compile what the presets and the probes need into the JIT caches of one architecture, and seal them.

    What is finished is not done again, also after a prewarm that was killed. Exit code 0: all is done, 1: a task
    failed, or what was sealed was changed, 2: another architecture's folder, or one that cannot be written, 4: a task
    did not run, 6: a full disk.
    """
    from ..catalog.bridge import read_catalog
    from ..catalog.prewarm import read_prewarm
    from ..jitcache.prewarm import SealOptions, run_prewarm
    from ..jitcache.stack import JitOptions
    from ..report.describe.jit import describe_prewarm
    from .output import finish

    catalog = read_catalog(matrix)
    names = None if tasks is None else split_names(tasks)
    options = JitOptions(target, names, root, python, mode, ranks, jobs, at_build, seed, limit)
    sealing = SealOptions(reopen, seal, shared)
    result = run_prewarm(catalog, read_prewarm(catalog, matrix), options, sealing, write_error_line)
    finish(result, describe_prewarm, fmt, output, verbose=verbose)
