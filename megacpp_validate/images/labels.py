"""Names of the labels that tie an image to this checkout: written by the plan, read wherever an image is held to it."""

from __future__ import annotations

from typing import Final

TARGET_LABEL: Final = "org.megacpp.target"
ARCH_LABEL: Final = "org.megacpp.arch"
LOCK_LABEL: Final = "org.megacpp.lock.sha256"
PINS_LABEL: Final = "org.megacpp.pins.sha256"
