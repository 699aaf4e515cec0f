"""The verb that compiles ahead of time."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..app import Format, MatrixOption, OutputOption, app, split_names
from ..sessions.session_options import PythonOption, SeedOption
from ..told_options import PlainFormat, PlainFormatOption


class Mode(StrEnum):
    """What compiles DeepGEMM's kernels."""

    NVCC = "nvcc"
    NVRTC = "nvrtc"


RootOption = Annotated[
    Path | None, typer.Option("--root", help="Root of the JIT caches; else MEGACPP_JIT_ROOT, else .megacpp/jit.")
]
TasksOption = Annotated[
    list[str] | None, typer.Option("--tasks", help="Rows of matrix/prewarm.toml, with commas or repeated; else all.")
]
KernelsOption = Annotated[bool, typer.Option("--verbose", help="List every kernel and shape that was compiled.")]
RanksOption = Annotated[int, typer.Option("--ranks", min=1, help="Take cells of up to so many devices, too.")]
ModeOption = Annotated[Mode, typer.Option("--mode", help="What compiles DeepGEMM's kernels; part of their keys.")]
AtBuildOption = Annotated[bool, typer.Option("--at-build", help="Only what needs no GPU, as when an image is built.")]
TargetOption = Annotated[str, typer.Option("--target", help="A row of matrix/targets.toml: h200, b200, gb10, cpu.")]


@app.command()
def prewarm(
    target: TargetOption,
    root: RootOption = None,
    python: PythonOption = "",
    at_build: AtBuildOption = False,
    tasks: TasksOption = None,
    jobs: Annotated[int, typer.Option(min=0, help="Processes at a time; 0: one a core, 8 at most.")] = 0,
    ranks: RanksOption = 1,
    mode: ModeOption = Mode.NVCC,
    reopen: Annotated[
        bool, typer.Option("--reopen", help="Go on in a sealed cache; it is sealed again after.")
    ] = False,
    seal: Annotated[bool, typer.Option("--seal/--no-seal", help="Seal it when all is done.")] = True,
    shared: Annotated[
        bool, typer.Option("--shared", help="Sealed so that any user may add files, as in an image.")
    ] = False,
    seed: SeedOption = 0,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one task may take.")] = 900.0,
    verbose: KernelsOption = False,
    fmt: PlainFormatOption = PlainFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Compile what the presets and the probes will ask for, into the JIT caches of one architecture, and seal them.

    What is finished is not done again, also after a prewarm that was killed. Exit code 0: all is done, 1: a task
    failed, or what was sealed was changed, 2: another architecture's folder, or one that cannot be written, 4: a task
    did not run, 6: a full disk.
    """
    from .jit_stack import AskedJit
    from .prewarm_runs import How, run_prewarm

    names = None if tasks is None else split_names(tasks)
    asked = AskedJit(target, names, root, python, mode.value, ranks, jobs, seed, limit)
    run_prewarm(matrix, asked, How(at_build, reopen, seal, shared), Format(fmt), output, verbose=verbose)
