"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

LARGEST_SEED: Final = 2**63 - 1  # torch and JSON hold 64 bits, and a verb counts on from the seed
LONGEST_LIMIT_S: Final = 604_800.0  # a week. More is a typing error, and infinity is no time of a job

Matrix = Annotated[Path | None, typer.Option(help="Folder of the matrix files.")]
Receipts = Annotated[Path, typer.Option(help="Folder for the receipts and logs.")]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of weights and inputs.")]
Python = Annotated[str, typer.Option(help="Interpreter of the stack; else MEGACPP_PYTHON, else the host's.")]
Overlays = Annotated[
    list[Path] | None, typer.Option(help="Site folders, or folders of them; repeated. Default: MEGACPP_OVERLAYS.")
]
Target = Annotated[str, typer.Option(help="A row of matrix/targets.toml: h200, b200, gb10, cpu.")]
Limit = Annotated[
    float, typer.Option(min=1, max=LONGEST_LIMIT_S, help="Seconds that one cell, task or import may take.")
]
Jobs = Annotated[int, typer.Option(min=0, help="Processes at a time; 0: what suits this machine.")]
Probes = Annotated[list[str] | None, typer.Option(help="Probes or cells, with commas or repeated; all without it.")]
Cells = Annotated[
    list[str] | None, typer.Option(help="Ids of cells, * and ? allowed, with commas or repeated; all without it.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Run again what has a receipt already.")]

# Scores of planted faults.
Faults = Annotated[list[str] | None, typer.Option(help="Ids, with commas or repeated; all without it.")]
Copies = Annotated[Path | None, typer.Option(help="Folder for the copies with faults.")]
JudgeOnly = Annotated[bool, typer.Option("--judge-only", help="Run nothing: judge the receipts that exist.")]

# JIT caches.
Root = Annotated[Path | None, typer.Option(help="Root of the JIT caches; else MEGACPP_JIT_ROOT, else .megacpp/jit.")]
Tasks = Annotated[
    list[str] | None, typer.Option(help="Rows of matrix/prewarm.toml, with commas or repeated; else all.")
]
AtBuild = Annotated[bool, typer.Option("--at-build", help="Only what needs no GPU, as when an image is built.")]
Ranks = Annotated[int, typer.Option(min=1, help="Take cells of up to so many devices, too.")]

# Images.
Base = Annotated[
    str, typer.Option("--base", envvar="MEGACPP_BASE", help="REPOSITORY@sha256:DIGEST in place of the pinned base.")
]
Store = Annotated[Path, typer.Argument(help="Folder of receipts; every folder below it that holds some is a run.")]
Env = Annotated[
    list[str] | None,
    typer.Option(
        help="Environment that NEW is for: cublas=13.1,cudnn=9.14,torch=2.11 | a `pip freeze` file | doctor's JSON | "
        "an interpreter | an NGC tag of the matrix; repeated, the later one counts."
    ),
]
