"""Options that the verbs of the JIT caches share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RootOption = Annotated[
    Path | None, typer.Option("--root", help="Root of the JIT caches; else MEGACPP_JIT_ROOT, else .megacpp/jit.")
]
TargetOption = Annotated[str, typer.Option("--target", help="A row of matrix/targets.toml: h200, b200, gb10, cpu.")]
TasksOption = Annotated[
    list[str] | None, typer.Option("--tasks", help="Rows of matrix/prewarm.toml, with commas or repeated; else all.")
]
PythonOption = Annotated[
    str, typer.Option("--python", help="Interpreter of the stack; else MEGACPP_PYTHON, else the host's.")
]
AtBuildOption = Annotated[bool, typer.Option("--at-build", help="Only what needs no GPU, as when an image is built.")]
JobsOption = Annotated[int, typer.Option("--jobs", min=0, help="Processes at a time; 0: one a core, 8 at most.")]
RanksOption = Annotated[int, typer.Option("--ranks", min=1, help="Take cells of up to so many devices, too.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, max=2**31 - 1, help="Of weights and inputs.")]
LimitOption = Annotated[float, typer.Option("--limit", min=1, help="Seconds that one task may take.")]
KernelsOption = Annotated[bool, typer.Option("--verbose", help="List every kernel and shape that was compiled.")]
