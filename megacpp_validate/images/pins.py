"""Digests of base images: those that a registry confirmed (`containers/pins.json`), else those that the matrix claims.

A confirmed pin keeps the image index as the registry returned it; the hash of the index is the digest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Final

from pydantic import Field

from ..catalog.images import Base, Images
from ..evidence.values import Frozen
from .tools import MIRROR, ImageRefused, RegistryLies, RegistryUnreachable, read_manifest, use_mirror

FILE: Final = "containers/pins.json"
WRITER: Final = "nox -s lock"


class PinsDamaged(ImageRefused):
    """The file of pins is not what `nox -s lock` writes."""


class Pin(Frozen):
    """The digest of a base, confirmed by a registry.

    Attributes:
        base: row of images.toml.
        index_digest: of the index over all platforms.
        verified: day on which a registry returned the index.
        document: the index.
    """

    base: str
    repository: str
    tag: str
    index_digest: str
    verified: str = Field(pattern=r"^\d{4}-\d\d-\d\d$")
    document: str


class Pins(Frozen):
    """The whole file."""

    generated_by: str = WRITER
    pins: tuple[Pin, ...] = ()

    @property
    def hash(self) -> str:
        """The SHA-256 of the file."""
        return sha256(self.render().encode()).hexdigest()

    def render(self) -> str:
        """The text of the file."""
        return json.dumps(self.model_dump(), indent=2, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class BaseDigests:
    """What is known of the digests of a base.

    Attributes:
        digests: platform -> digest; "" is the index over all platforms. Empty where nothing is known.
        verified: day on which a registry confirmed them; empty where none has.
        unverified: why they are not confirmed; empty where they are.
    """

    digests: Mapping[str, str]
    verified: str = ""
    unverified: str = ""

    def get(self, platform: str) -> str:
        """The digest from which a build for a platform starts; empty where it is unknown."""
        return self.digests.get("", "") or self.digests.get(platform, "")


class PinNews(StrEnum):
    """How the pin of a base was decided."""

    VERIFIED = "verified"  # a registry confirms it
    CHANGED = "changed"  # refused: another digest than before, or than the matrix claims
    KEPT = "kept"  # the pin stays: no registry answered
    CLAIMED = "claimed"  # no registry has confirmed a digest, and the claim of the matrix counts
    MISSING = "missing"  # no registry answered, and there is no claim


class PinLine(Frozen):
    """The pin of a base.

    Attributes:
        before, after: digests of the index, empty where there is none.
        how: why it is not verified, or not this time.
        refusal: why it must not be written; empty where it may be.
    """

    base: str
    reference: str
    before: str
    after: str
    news: PinNews
    verified: str
    how: str
    refusal: str = ""


def read_pins(file: Path) -> Pins:
    """The pins of a file; none where there is no file.

    Raises:
        PinsDamaged: the file cannot be read, or is not what `nox -s lock` writes.
    """
    if not file.is_file():
        return Pins()
    try:
        text = file.read_text(encoding="utf-8")
        found = Pins.model_validate_json(text)
        wrong = [
            pin.base for pin in found.pins if pin.index_digest != _hash(pin.document) or not read_index(pin.document)
        ]
        if wrong or found.render() != text:
            raise ValueError(f"it is not what `{WRITER}` writes {wrong}")
        return found
    except ValueError as fault:  # a ValidationError is a ValueError
        raise PinsDamaged(
            f"{file} is not a valid file of pins: {' '.join(str(fault).split())[:400]}. Likely cause: it was edited by "
            f"hand. Next step: restore it from version control, or delete it and let `{WRITER}` write it."
        ) from fault


def _hash(document: str) -> str:
    return f"sha256:{sha256(document.encode()).hexdigest()}"


def read_index(text: str) -> dict[str, str]:
    """Platform -> digest of every image of an index.

    Raises:
        ValueError: the text is no image index.
    """
    try:
        # linux/arm64 means its first variant, v8; attestations are of an unknown platform.
        rows = [row for row in json.loads(text)["manifests"] if row["platform"]["os"] != "unknown"]
        rows.sort(key=lambda row: row["platform"].get("variant", "") in ("", "v8"))
        return {f"{row['platform']['os']}/{row['platform']['architecture']}": str(row["digest"]) for row in rows}
    except (KeyError, TypeError, AttributeError) as fault:
        raise ValueError(f"{text[:60]!r} is not an image index: {fault!r}") from fault


def find_digests(images: Images, base: Base, pins: Pins) -> BaseDigests:
    """The digests of a base: confirmed ones, else those that the matrix claims."""
    for pin in pins.pins:
        if (pin.base, pin.repository, pin.tag) == (base.id, base.repository, base.tag):
            return BaseDigests({"": pin.index_digest} | read_index(pin.document), pin.verified)
    claims = [claim for claim in images.claim if claim.base == base.id]
    sources = "; ".join(dict.fromkeys(claim.source for claim in claims))
    why = f"no registry has confirmed the digest; the matrix claims it ({sources})" if claims else "not pinned"
    return BaseDigests({claim.platform: claim.digest for claim in claims}, unverified=why)


def resolve_tag(images: Images, base: Base, today: str, variables: Mapping[str, str]) -> Pin:
    """The pin that a registry gives for the tag of a base now.

    Raises:
        RegistryLies, RegistryUnreachable: as `tools.read_manifest`.
        ImageRefused: there is no image for a platform of the matrix.
    """
    name = f"{base.repository}:{base.tag}"
    raw = read_manifest(f"{use_mirror(base.repository, variables.get(MIRROR, ''))}:{base.tag}", variables)
    try:
        text = raw.decode()
        found = read_index(text)
    except ValueError as fault:
        raise RegistryLies(
            f"{name}: {fault}. Likely cause: a login page or a proxy answers, or the mirror keeps one platform. Next "
            "step: use another mirror."
        ) from fault
    if missing := sorted({image.platform for image in images.image if image.base == base.id} - found.keys()):
        raise ImageRefused(f"{name} has no image for {', '.join(missing)}. Next step: choose another base.")
    return Pin(
        base=base.id, repository=base.repository, tag=base.tag, index_digest=_hash(text), verified=today, document=text
    )


def pin_bases(
    images: Images, pins: Pins, today: str, accepted: frozenset[str], variables: Mapping[str, str]
) -> tuple[Pins, tuple[PinLine, ...]]:
    """The pins that the file should have, and a row a base that an image uses.

    Args:
        accepted: tags, or ids of bases, whose digest may change.

    Raises:
        RegistryLies, ImageRefused: as `resolve_tag`.
    """
    bases = _list_bases(images)
    kept = {pin.base: pin for pin in pins.pins if pin.base in {base.id for base in bases}}
    lines = []
    for base in bases:
        known = find_digests(images, base, pins)
        try:
            now = resolve_tag(images, base, today, variables)
        except RegistryUnreachable as fault:
            line = _read_line(base, known)
            lines.append(line.model_copy(update={"how": f"{line.how} ({fault})".strip()}))
            continue
        found = {"": now.index_digest} | read_index(now.document)
        changed = [name for name, digest in known.digests.items() if found.get(name, digest) != digest]
        line = PinLine(
            base=base.id, reference=f"{base.repository}:{base.tag}", before=known.digests.get("", ""),
            after=now.index_digest, news=PinNews.VERIFIED, verified=today, how="",
        )  # fmt: skip
        if changed and not {base.tag, base.id} & accepted:
            refusal = (
                f"{line.reference} is another image now: {known.digests[changed[0]]} is {found[changed[0]]}"
                f"{f'; {known.unverified}' if known.unverified else ''}. Likely cause: the tag was pushed again, or "
                "this is not the intended registry. Next step: find out what changed; then "
                f"`{WRITER} -- --accept {base.tag}`, and commit what it writes."
            )
            line = line.model_copy(update={"news": PinNews.CHANGED, "verified": "", "refusal": refusal})
        kept[base.id] = now
        lines.append(line)
    return Pins(pins=tuple(kept[name] for name in sorted(kept))), tuple(lines)


def check_pins(images: Images, pins: Pins) -> tuple[PinLine, ...]:
    """The pins, compared with the matrix; no registry is read."""
    return tuple(_read_line(base, find_digests(images, base, pins)) for base in _list_bases(images))


def _read_line(base: Base, known: BaseDigests) -> PinLine:
    news = PinNews.KEPT if known.verified else PinNews.CLAIMED if known.digests else PinNews.MISSING
    digest = next(iter(known.digests.values()), "")
    return PinLine(
        base=base.id, reference=f"{base.repository}:{base.tag}", before=digest, after=digest, news=news,
        verified=known.verified, how=known.unverified,
    )  # fmt: skip


def _list_bases(images: Images) -> list[Base]:
    used = {image.base for image in images.image}
    return [base for base in images.base if base.id in used]
