"""Names of the labels that tie an image to this checkout: written by the plan, read wherever an image is held to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..evidence.json_text import read_json
from .refusals import ImageRefused

TARGET_LABEL: Final = "org.megacpp.target"
ARCH_LABEL: Final = "org.megacpp.arch"
LOCK_LABEL: Final = "org.megacpp.lock.sha256"
PINS_LABEL: Final = "org.megacpp.pins.sha256"


def read_config(raw: bytes, digest: str) -> dict[str, Any]:
    """The configuration of an image.

    Raises:
        ImageRefused: it is none: a registry holds more than images.
    """
    try:
        config = read_json(raw)
        inner = config.get("config") or {}
        if not isinstance(inner.get("Labels") or {}, dict):
            raise ValueError("its labels are no table")
    except (ValueError, AttributeError) as fault:
        raise ImageRefused(
            f"{digest} is no configuration of an image: {fault}. Likely cause: the digest is of something else. Next "
            "step: give that of the image."
        ) from fault
    return dict(config)


def labels_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The labels in a configuration that was read."""
    return (config.get("config") or {}).get("Labels") or {}
