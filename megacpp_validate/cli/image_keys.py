"""`image-keys`: a pair of keys that signs images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .app import Format, FormatOption, OutputOption, app


@app.command()
def image_keys(
    prefix: Annotated[Path, typer.Argument(help="PREFIX.key and PREFIX.pub are written.")] = Path("cosign"),
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
) -> None:
    """Make a key pair that signs images: the private one under the password of COSIGN_PASSWORD.

    Exit code 0: it is there, 2: there is one already, or no password, 5: cosign is missing.
    """
    from ..images.supply import make_keys
    from ..report.describe.images import describe_keys
    from .output import finish

    finish(make_keys(prefix, os.environ), describe_keys, fmt, output)
