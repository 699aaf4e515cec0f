"""`image-sign`: attest what is inside an image, and sign it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .. import TOOL
from .app import Result, verb, write_error_line
from .options import Matrix


@verb("images:describe_signing")
def image_sign(
    image: Annotated[str, typer.Argument(help="REPOSITORY@sha256:DIGEST in a registry.")],
    key: Annotated[Path, typer.Option(help="Private key; COSIGN_PASSWORD has its password.")],
    sbom: Annotated[Path | None, typer.Option(help="SBOM in SPDX; else syft makes it.")] = None,
    target: Annotated[str, typer.Option(help="Target of the image; else what its label says.")] = "",
    matrix: Matrix = None,
) -> Result:
    """Attest the SBOM of an image, and sign it by its digest, with a key of one's own.

    Exit code 0: it is signed, 1: the registry gives other bytes than the digest says, 2: an argument is wrong, 5:
    cosign or syft is missing, 6: the registry does not answer.
    """
    from ..images.plan import ImageRows
    from ..images.supply import sign_image

    return sign_image(ImageRows(matrix, TOOL, os.environ), image, key, sbom, target, write_error_line)
