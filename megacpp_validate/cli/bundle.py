"""`bundle`: an image, its wheels and its caches in one folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .. import TOOL
from .app import Result, verb, write_error_line
from .options import Matrix


@verb("images:describe_bundle")
def bundle(
    target: Annotated[str, typer.Argument(help="A row of matrix/targets.toml that has an image.")],
    image: Annotated[str | None, typer.Option(help="REPOSITORY@sha256:DIGEST in a registry.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; else bundle-TARGET.")] = None,
    jit: Annotated[Path | None, typer.Option(help="JIT caches: the root folder, with one an architecture.")] = None,
    key: Annotated[Path | None, typer.Option(help="Public key to put in.")] = None,
    sign_key: Annotated[Path | None, typer.Option(help="Private key that signs the bundle, with cosign.")] = None,
    matrix: Matrix = None,
) -> Result:
    """Write one folder that gives a host without a network the environment of a target.

    Exit code 0: it is there, and was read back, 1: what the registry gives is not what the digest says, 2: the matrix
    or an argument is wrong, or it is there already, 5: oras, cosign or openssl is missing, 6: the registry does not
    answer, or the disk is full; the same command then goes on where it was.
    """
    from ..images.bundle import BundleOptions, write_bundle
    from ..images.plan import ImageRows

    place = (out or Path(f"bundle-{target}")).absolute()
    options = BundleOptions(target, image, place, jit, key, sign_key)
    return write_bundle(ImageRows(matrix, TOOL, os.environ), options, write_error_line)
