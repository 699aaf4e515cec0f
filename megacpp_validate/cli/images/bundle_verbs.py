"""The verb of offline bundles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...catalog.bridge import read_catalog
from ..app import MatrixOption, OutputOption, app
from ..told_options import PageFormat, PageFormatOption


@app.command()
def bundle(
    target: Annotated[str, typer.Argument(help="A row of matrix/targets.toml that has an image.")],
    image: Annotated[str | None, typer.Option("--image", help="REPOSITORY@sha256:DIGEST in a registry.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write; else bundle-TARGET.")] = None,
    part_size: Annotated[str, typer.Option("--part-size", help="Bytes of the largest file: 700MB, 4GiB.")] = "4GiB",
    jit: Annotated[
        Path | None, typer.Option("--jit", help="JIT caches: a folder with one an architecture, or an archive.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="Public key that is laid in.")] = None,
    sign_key: Annotated[
        Path | None, typer.Option("--sign-key", help="Private key that signs the bundle, with cosign.")
    ] = None,
    fmt: PageFormatOption = PageFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Write one folder with which a host without a network gets the environment of a target.

    Exit code 0: it is there, and was read back, 1: what the registry gives is not what the digest says, 2: the matrix
    or an argument is wrong, or it is there already, 5: no cosign to sign it with, 6: the registry does not answer, or
    the disk is full; the same command then goes on where it was.
    """
    from .bundle_runs import Asked, run_bundle

    asked = Asked(target, image, (out or Path(f"bundle-{target}")).absolute(), part_size, jit, key, sign_key)
    run_bundle(read_catalog(matrix), matrix, asked, fmt, output)
