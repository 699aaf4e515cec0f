"""`bundle`: an image, its wheels and its caches in one folder."""

from pathlib import Path
from typing import Annotated

from .app import Context, Result, say, verb


@verb("images:describe_bundle")
def bundle(
    context: Context,
    target: Annotated[str, "A row of matrix/targets.toml that has an image."],
    /,
    image: Annotated[str | None, "REPOSITORY@sha256:DIGEST in a registry."] = None,
    out: Annotated[Path | None, "Folder to write; else bundle-TARGET."] = None,
    jit: Annotated[Path | None, "JIT caches: the root folder, with one an architecture."] = None,
    key: Annotated[Path | None, "Public key to put in."] = None,
    sign_key: Annotated[Path | None, "Private key that signs the bundle, with cosign."] = None,
) -> Result:
    """Write one folder that gives a host without a network the environment of a target.

    Exit code 0: it is there, and was read back, 1: what the registry gives is not what the digest says, 2: the matrix
    or an argument is wrong, or it is there already, 4: the JIT caches are not sealed, 5: cosign is missing, 6: the
    registry does not answer, or the disk is full.
    """
    from ..images.bundle import BundleOptions, write_bundle

    place = (out or Path(f"bundle-{target}")).absolute()
    return write_bundle(context.images, BundleOptions(target, image, place, jit, key, sign_key), say)
