"""The verbs of the supply chain: keys, signing, and verifying an image by its digest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...catalog.bridge import read_catalog
from ..app import MatrixOption, OutputOption, app
from ..told_options import PageFormat, PageFormatOption

ImageArgument = Annotated[str, typer.Argument(help="REPOSITORY@sha256:DIGEST in a registry.")]


@app.command()
def image_verify(
    image: ImageArgument,
    key: Annotated[Path | None, typer.Option("--key", help="Public key that must have signed it.")] = None,
    target: Annotated[str, typer.Option("--target", help="What it must be for; else what its label says.")] = "",
    base: Annotated[
        str,
        typer.Option("--base", envvar="MEGACPP_BASE", help="REPOSITORY@sha256:... that it was built on with --base."),
    ] = "",
    deep: Annotated[bool, typer.Option("--deep", help="Read and hash every layer.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="List the packages whose licence is unknown.")] = False,
    fmt: PageFormatOption = PageFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Is an image what its digest, the plan and a key say? Also its SBOM, provenance and licences.

    Exit code 0: every check passes, 1: one fails, 2: no digest, or the matrix is wrong, 4: none fails and not all were
    run, 6: the registry does not answer.
    """
    from .image_verify_runs import AskedVerify, run_image_verify

    asked = AskedVerify(image, key, target, base, deep)
    run_image_verify(read_catalog(matrix), matrix, asked, fmt, output, verbose=verbose)


@app.command()
def image_sign(
    image: ImageArgument,
    key: Annotated[Path, typer.Option("--key", help="Private key; COSIGN_PASSWORD has its password.")],
    sbom: Annotated[Path | None, typer.Option("--sbom", help="SBOM in SPDX; else syft makes it.")] = None,
    target: Annotated[str, typer.Option("--target", help="What it is for; else what its label says.")] = "",
    matrix: MatrixOption = None,
) -> None:
    """Attest what is inside an image, as SBOM and as licences, and sign it by its digest, with a key of one's own.

    Exit code 0: it is signed, 1: the registry gives other bytes than the digest says, 2: an argument is wrong, 5: no
    cosign or no syft, 6: the registry does not answer.
    """
    from .image_verify_runs import run_image_sign

    run_image_sign(read_catalog(matrix), matrix, image, key, sbom, target)


@app.command()
def image_keys(
    prefix: Annotated[Path, typer.Argument(help="PREFIX.key and PREFIX.pub are written.")] = Path("cosign"),
) -> None:
    """Make a key pair that signs images: the private one under the password of COSIGN_PASSWORD.

    Exit code 0: it is there, 2: there is one already, or no password, 5: no cosign.
    """
    from .image_verify_runs import run_image_keys

    run_image_keys(prefix)
