"""`image-verify`: is an image what its digest, the plan and a key say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .. import TOOL
from .app import Result, verb
from .options import Base, Matrix


@verb("images:describe_verdict", verbose="List the packages whose licence is unknown.")
def image_verify(
    image: Annotated[str, typer.Argument(help="REPOSITORY@sha256:DIGEST in a registry.")],
    key: Annotated[Path | None, typer.Option(help="Public key that must have signed it.")] = None,
    target: Annotated[str, typer.Option(help="What it must be for; else what its label says.")] = "",
    base: Base = "",
    deep: Annotated[bool, typer.Option("--deep", help="Read and hash every layer.")] = False,
    matrix: Matrix = None,
) -> Result:
    """Is an image what its digest, the plan and a key say? Also its SBOM and provenance.

    Exit code 0: every check passes, 1: one fails, 2: no digest, or the matrix is wrong, 4: none fails and not all were
    run, 6: the registry does not answer.
    """
    from ..images.plan import ImageRows
    from ..images.supply import verify_image

    return verify_image(ImageRows(matrix, TOOL, os.environ), image, key, target, base, deep=deep)
