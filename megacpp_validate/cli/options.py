"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from .app import split_names

_COMMAS: Final = "with commas or repeated; all without it."

Overlays = Annotated[tuple[Path, ...], "Site folders, or folders of them; repeated. Default: MEGACPP_OVERLAYS."]
Target = Annotated[str, "A row of matrix/targets.toml: h200, b200, gb10, cpu."]
Jobs = Annotated[int, typer.Option(min=0, help="Processes at a time; 0: what suits this machine.")]
Probes = Annotated[tuple[str, ...], f"Probes or cells, {_COMMAS}", split_names]
Cells = Annotated[tuple[str, ...], f"Ids of cells, * and ? allowed, {_COMMAS}", split_names]
Fresh = Annotated[bool, "Run again what has a receipt already."]

# Scores of planted faults.
Faults = Annotated[tuple[str, ...], f"Ids, {_COMMAS}", split_names]
Release = Annotated[str, "Of Transformer Engine; the pinned one without it."]

# JIT caches.
Root = Annotated[Path | None, "Root of the JIT caches; else MEGACPP_JIT_ROOT, else .megacpp/jit."]
Tasks = Annotated[tuple[str, ...], f"Rows of matrix/prewarm.toml, {_COMMAS}", split_names]
AtBuild = Annotated[bool, "Only what needs no GPU, as when an image is built."]
Ranks = Annotated[int, typer.Option(min=1, help="Take cells of up to so many devices, too.")]

# Images.
Base = Annotated[
    str, typer.Option("--base", envvar="MEGACPP_BASE", help="REPOSITORY@sha256:DIGEST in place of the pinned base.")
]
TE = Annotated[str, "A release of Transformer Engine in place of the pinned one, with a lock of its own."]
Image = Annotated[str, "REPOSITORY@sha256:DIGEST in a registry."]
Store = Annotated[Path, "Folder of receipts; every folder below it that holds some is a run."]
