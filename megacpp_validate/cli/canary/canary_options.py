"""The options of the upgrade canary."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..sessions.seeds import LARGEST_SEED

LONGEST_LIMIT_S = 86_400.0  # of a cell; infinity is no time that a socket can wait

Releases = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[OLD] [NEW] [MORE]...",
        help="Release in use, release to judge, further ones; for the static tier also a folder that holds "
        "transformer_engine/.",
    ),
]
Every = Annotated[bool, typer.Option("--all", help="Every adjacent pair of releases, as one grid.")]
FirstBad = Annotated[str, typer.Option("--first-bad", help="The first release that breaks this module.")]
Listing = Annotated[bool, typer.Option("--list", help="List the releases on the index.")]
Tiers = Annotated[
    str | None,
    typer.Option(help="Of static, firewall, gpu, with commas; static without it, gpu with --all-installed."),
]
AllInstalled = Annotated[bool, typer.Option("--all-installed", help="Every release that this host has, oldest first.")]
Target = Annotated[str, typer.Option(help="A row of matrix/targets.toml; that of the GPU here without it.")]
Overlays = Annotated[
    list[Path] | None, typer.Option(help="Folder of site folders, one a release; repeated. Else MEGACPP_OVERLAYS.")
]
Environments = Annotated[
    list[str] | None,
    typer.Option(
        "--environment", help="NAME=overlay:DIR | python:PATH | venv:LOCK | image:REPOSITORY@DIGEST; repeated."
    ),
]
Python = Annotated[str, typer.Option(help="Interpreter that overlays stand on; else MEGACPP_PYTHON.")]
Probes = Annotated[
    list[str] | None, typer.Option("--probes", help="Modules to run, with commas or repeated; all without it.")
]
Receipts = Annotated[
    Path, typer.Option(help="Folder for receipts and logs; what it has of this run already is not run again.")
]
Jobs = Annotated[int, typer.Option(min=0, help="Cells at a time; 0: two less than there are cores.")]
GpuMemory = Annotated[
    float, typer.Option("--gpu-memory", min=0, metavar="MIB", help="For all cells together; 0: what is free.")
]
Limit = Annotated[float, typer.Option(min=1, max=LONGEST_LIMIT_S, help="Seconds that one cell may take.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Run again what there are receipts of.")]
NoTimes = Annotated[bool, typer.Option("--no-times", help="Time nothing.")]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Of weights and inputs.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="List harmless changes too.")]
