"""Options that the verbs of a session share: parity, fp8."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .seeds import LARGEST_SEED

ReceiptsOption = Annotated[Path, typer.Option("--receipts", help="Folder for the receipts and logs.")]
SeedOption = Annotated[
    int, typer.Option(min=0, max=LARGEST_SEED, help="Of weights and inputs; the same seed gives the same numbers.")
]
PythonOption = Annotated[str, typer.Option(help="Interpreter of the stack; else MEGACPP_PYTHON, else the host's.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", help="List every check with its bounds.")]
