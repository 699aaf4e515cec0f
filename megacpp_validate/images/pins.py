"""Pins of base images: `containers/pins.json` as typed values. `nox -s lock` alone writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..evidence.strict_json import refuse_what_json_hides
from .refusals import ImageRefused

FILE: Final = "containers/pins.json"
WRITER: Final = "nox -s lock"

_DIGEST: Final = r"^(sha256:[0-9a-f]{64})?$"


@dataclass(frozen=True)
class Pin:
    """The digest of a base.

    Attributes:
        base: row of images.toml.
        index_digest: of the index over all platforms; empty where a registry gave an image of one platform.
        platform_digests: platform -> digest of the image for it.
        verified: day on which a registry gave these ("2026-11-22"); empty where none has.
        how: how it was verified, or why it was not.
        source: where the digests are from.
    """

    base: str
    repository: str
    tag: str
    index_digest: str
    platform_digests: Mapping[str, str] = field(default_factory=dict)
    verified: str = ""
    how: str = ""
    source: str = ""

    def digest_for(self, platform: str) -> str:
        """What a build for a platform starts from: the index where there is one, else the platform's own."""
        return self.index_digest or self.platform_digests.get(platform, "")


@dataclass(frozen=True)
class Pins:
    """The whole file, and the SHA-256 of its bytes."""

    pins: tuple[Pin, ...] = ()
    hash: str = ""

    def find(self, base: str) -> Pin | None:
        """The pin of a base; None where there is none."""
        return next((pin for pin in self.pins if pin.base == base), None)


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    base: str = Field(min_length=1)
    repository: str = Field(min_length=1)
    tag: str = Field(min_length=1)
    index_digest: str = Field(pattern=_DIGEST)
    platform_digests: dict[str, str]
    verified: str = Field(pattern=r"^(\d{4}-\d\d-\d\d)?$")
    how: str
    source: str


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    generated_by: str
    pins: list[_Row]


def read_pins(file: Path) -> Pins:
    """The pins of a file; none where there is no file.

    Raises:
        ImageRefused: it cannot be read, or is not what the verb writes.
    """
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return Pins()
    except OSError as fault:
        raise ImageRefused(
            f"the pins {file} cannot be read: {fault.strerror or fault}. Next step: make it readable."
        ) from fault
    try:
        refuse_what_json_hides(data)
        read = _File.model_validate_json(data)
    except (ValueError, ValidationError) as fault:
        words = str(fault).splitlines()[0]
        raise ImageRefused(
            f"{file} is no file of pins: {words}. Likely cause: it was edited by hand, or cut short. Next step: take "
            f"it from version control, or delete it and let `{WRITER}` write it."
        ) from fault
    return Pins(tuple(Pin(**row.model_dump()) for row in read.pins), sha256(data).hexdigest())


def render_pins(pins: tuple[Pin, ...]) -> str:
    """The text of the file, in an order that does not depend on when it was written."""
    rows: list[dict[str, Any]] = [
        {
            "base": pin.base,
            "repository": pin.repository,
            "tag": pin.tag,
            "index_digest": pin.index_digest,
            "platform_digests": dict(sorted(pin.platform_digests.items())),
            "verified": pin.verified,
            "how": pin.how,
            "source": pin.source,
        }
        for pin in sorted(pins, key=lambda pin: pin.base)
    ]
    return json.dumps({"generated_by": WRITER, "pins": rows}, indent=2, ensure_ascii=False) + "\n"
