"""`bundle`: an image, its wheels and its caches in one folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .. import TOOL
from .app import Format, FormatOption, MatrixOption, OutputOption, app


@app.command()
def bundle(
    target: Annotated[str, typer.Argument(help="A row of matrix/targets.toml that has an image.")],
    image: Annotated[str | None, typer.Option("--image", help="REPOSITORY@sha256:DIGEST in a registry.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write; else bundle-TARGET.")] = None,
    jit: Annotated[
        Path | None, typer.Option("--jit", help="JIT caches: the root folder, with one an architecture.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="Public key to put in.")] = None,
    sign_key: Annotated[
        Path | None, typer.Option("--sign-key", help="Private key that signs the bundle, with cosign.")
    ] = None,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Write one folder that gives a host without a network the environment of a target.

    Exit code 0: it is there, and was read back, 1: what the registry gives is not what the digest says, 2: the matrix
    or an argument is wrong, or it is there already, 5: cosign is missing, 6: the registry does not
    answer, or the disk is full.
    """
    from ..images.bundle import BundleOptions, write_bundle
    from ..images.plan import ImageRows
    from ..report.describe.images import describe_bundle
    from .output import finish

    place = (out or Path(f"bundle-{target}")).absolute()
    options = BundleOptions(target, image, place, jit, key, sign_key)
    result = write_bundle(ImageRows(matrix, TOOL, os.environ), options, lambda line: typer.echo(line, err=True))
    finish(result, describe_bundle, fmt, output)
