"""Pins of base images: `containers/pins.json` as typed values. `nox -s lock` alone writes it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..evidence.strict_json import refuse_what_json_hides
from .manifests import Document, NoManifest, read_document
from .refusals import ImageRefused, PinsDamaged

FILE: Final = "containers/pins.json"
WRITER: Final = "nox -s lock"

_MOST_FAULTS: Final = 4
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
        document: what the registry gave for the tag, by which anybody can reckon the digest; empty where none gave any.
    """

    base: str
    repository: str
    tag: str
    index_digest: str
    platform_digests: Mapping[str, str] = field(default_factory=dict)
    verified: str = ""
    how: str = ""
    source: str = ""
    document: str = ""

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
    platform_digests: dict[str, Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]]
    verified: str = Field(pattern=r"^(\d{4}-\d\d-\d\d)?$")
    how: str
    source: str
    document: str = ""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    generated_by: str
    pins: list[_Row]


def read_pins(file: Path, today: date | None = None) -> Pins:
    """The pins of a file; none where there is no file.

    A pin that says when a registry verified it shows what the registry gave: without it anybody could write a day down.

    Args:
        today: for tests.

    Raises:
        ImageRefused: it cannot be read.
        PinsDamaged: it is not what the verb writes, or a pin that says that it was verified does not show it.
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
    except ValidationError as fault:
        words = "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'the file'}: {one['msg']}" for one in fault.errors()[:_MOST_FAULTS]
        )
        raise _refuse(file, words) from fault
    except ValueError as fault:
        raise _refuse(file, str(fault).splitlines()[0]) from fault
    found = Pins(tuple(Pin(**row.model_dump()) for row in read.pins), sha256(data).hexdigest())
    if faults := tuple(_find_faults(found, today or datetime.now(UTC).date())):
        raise _refuse(file, "; ".join(faults[:_MOST_FAULTS]))
    return found


def _refuse(file: Path, words: str) -> PinsDamaged:
    return PinsDamaged(
        f"{file} is no file of pins: {words}. Likely cause: it was edited by hand, cut short, or written by an earlier "
        f"release of this tool. Next step: take it from version control, or delete it and let `{WRITER}` write it."
    )


def _find_faults(pins: Pins, today: date) -> Iterator[str]:
    counts = Counter(pin.base for pin in pins.pins)
    yield from (f"the base {name} is there {count} times" for name, count in counts.items() if count > 1)
    for pin in pins.pins:
        if pin.verified and (fault := _doubt(pin, today)):
            yield f"{pin.base} says that a registry verified it on {pin.verified}, and {fault}"


def _doubt(pin: Pin, today: date) -> str:
    """Why a pin cannot have been verified as it says; empty where it shows that it was."""
    try:
        # A day more, for a host whose clock is of another zone.
        if date.fromisoformat(pin.verified) > today + timedelta(days=1):
            return "that day has not come yet"
        told = read_document(pin.document.encode())
    except NoManifest:
        return "does not show what the registry gave"
    except ValueError:
        return "there is no such day"
    found = f"sha256:{sha256(pin.document.encode()).hexdigest()}"
    own = [*filter(None, [pin.index_digest]), *pin.platform_digests.values()]
    digests = [pin.index_digest] if told.is_index else own
    if digests != [found]:
        return f"what it shows hashes to {found}"
    known = {*told.nameless, *told.platforms.values()} if told.is_index else {*digests}
    strange = [
        name for name, digest in pin.platform_digests.items() if digest not in known or _is_other(told, name, digest)
    ]
    if strange or not pin.platform_digests:
        return f"the index that it shows has another image for {', '.join(strange) or 'every platform'}"
    return ""


def _is_other(index: Document, platform: str, digest: str) -> bool:
    return platform in index.platforms and index.platforms[platform] != digest


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
            **({"document": pin.document} if pin.document else {}),
        }
        for pin in sorted(pins, key=lambda pin: pin.base)
    ]
    return json.dumps({"generated_by": WRITER, "pins": rows}, indent=2, ensure_ascii=False) + "\n"
