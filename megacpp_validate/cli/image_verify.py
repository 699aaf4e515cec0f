"""`image-verify`: is an image what its digest, the plan and a key say."""

from pathlib import Path
from typing import Annotated

from .app import Context, Result, verb
from .options import Base, Image


@verb("images:describe_verdict")
def image_verify(
    context: Context,
    image: Image,
    /,
    key: Annotated[Path | None, "Public key that must have signed it."] = None,
    target: Annotated[str, "What it must be for; else what its label says."] = "",
    base: Base = "",
) -> Result:
    """Is an image what its digest, the plan and a key say? Also its SBOM and provenance.

    Exit code 0: every check passes, 1: one fails, 2: no digest, or the matrix is wrong, 4: none fails and not all were
    run, 6: the registry does not answer.
    """
    from ..images.supply import verify_image

    return verify_image(context.images, image, key, target, base)
