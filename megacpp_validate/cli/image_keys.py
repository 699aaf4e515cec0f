"""`image-keys`: a pair of keys that signs images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .app import Result, verb


@verb("images:describe_keys")
def image_keys(
    prefix: Annotated[Path, typer.Argument(help="PREFIX.key and PREFIX.pub are written.")] = Path("cosign"),
) -> Result:
    """Make a key pair that signs images: the private one under the password of COSIGN_PASSWORD.

    Exit code 0: it is there, 2: there is one already, or no password, 5: cosign is missing.
    """
    from ..images.supply import make_keys

    return make_keys(prefix, os.environ)
