"""`image-sign`: attest what is inside an image, and sign it."""

from pathlib import Path
from typing import Annotated

from .app import Context, Result, say, verb
from .options import Image


@verb("images:describe_signing")
def image_sign(
    context: Context,
    image: Image,
    /,
    key: Annotated[Path, "Private key; COSIGN_PASSWORD has its password."],
) -> Result:
    """Attest the SBOM of an image, and sign it by its digest, with a key of one's own.

    Exit code 0: it is signed, 1: the registry gives other bytes than the digest says, 2: an argument is wrong, 5:
    cosign or syft is missing or fails, 6: the registry does not answer.
    """
    from ..images.supply import sign_image

    return sign_image(context.images, image, key, say)
