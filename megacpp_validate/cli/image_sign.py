"""`image-sign`: attest what is inside an image, and sign it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .. import TOOL
from .app import Format, FormatOption, MatrixOption, OutputOption, app


@app.command()
def image_sign(
    image: Annotated[str, typer.Argument(help="REPOSITORY@sha256:DIGEST in a registry.")],
    key: Annotated[Path, typer.Option("--key", help="Private key; COSIGN_PASSWORD has its password.")],
    sbom: Annotated[Path | None, typer.Option("--sbom", help="SBOM in SPDX; else syft makes it.")] = None,
    target: Annotated[str, typer.Option("--target", help="What it is for; else what its label says.")] = "",
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Attest the SBOM of an image, and sign it by its digest, with a key of one's own.

    Exit code 0: it is signed, 1: the registry gives other bytes than the digest says, 2: an argument is wrong, 5:
    cosign or syft is missing, 6: the registry does not answer.
    """
    from ..images.plan import ImageRows
    from ..images.supply import sign_image
    from ..report.describe.images import describe_signing
    from .output import finish

    rows = ImageRows(matrix, TOOL, os.environ)
    result = sign_image(rows, image, key, sbom, target, lambda line: typer.echo(line, err=True))
    finish(result, describe_signing, fmt, output)
