"""Digests of base images: `containers/pins.json`, what a registry has under a tag, and what the matrix claims.

A pin that a registry verified keeps the registry's document, whose hash is the digest: nobody can write a day down
without it. A pin that no registry has verified must be what a [[claim]] of the matrix says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Final

from pydantic import ConfigDict, Field

from ..catalog.images import Base, Images
from ..evidence.strict_json import read_json, read_strict_json
from ..evidence.values import Frozen
from .tools import (
    MIRROR,
    ImageRefused,
    NotInRegistry,
    RegistryLies,
    RegistryUnreachable,
    read_image,
    read_manifest,
    use_mirror,
)

FILE: Final = "containers/pins.json"
WRITER: Final = "nox -s lock"
_Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class PinsDamaged(ImageRefused):
    """The file of pins is not what `nox -s lock` writes."""


class Pin(Frozen):
    """The digest of a base.

    Attributes:
        base: row of images.toml.
        index_digest: of the index over all platforms; empty where the registry has an image of one platform.
        platform_digests: platform -> digest of its image.
        verified: day on which a registry gave these; empty where none has.
        how: how the pin was verified, or why not.
        source: "registry", or who claims the digest.
        document: what the registry gave for the tag; empty where none did.
    """

    model_config = ConfigDict(strict=True)

    base: str = Field(min_length=1)
    repository: str = Field(min_length=1)
    tag: str = Field(min_length=1)
    index_digest: _Digest | Annotated[str, Field(max_length=0)]
    platform_digests: dict[str, _Digest]
    verified: str = Field(default="", pattern=r"^(\d{4}-\d\d-\d\d)?$")
    how: str = ""
    source: str = ""
    document: str = ""

    def digest_for(self, platform: str) -> str:
        """What a build for a platform starts from: the index where there is one, else the platform's own image."""
        return self.index_digest or self.platform_digests.get(platform, "")

    @property
    def digests(self) -> dict[str, str]:
        """Every digest, that of the index first."""
        return ({"index": self.index_digest} if self.index_digest else {}) | self.platform_digests


class Pins(Frozen):
    """The whole file, and the SHA-256 of its bytes."""

    pins: tuple[Pin, ...] = ()
    hash: str = ""

    def find(self, base: str) -> Pin | None:
        """The pin of a base; None where there is none."""
        return next((pin for pin in self.pins if pin.base == base), None)


class _File(Frozen):
    generated_by: str
    pins: list[Pin]


class PinNews(StrEnum):
    """What became of the pin of a base."""

    VERIFIED = "verified"  # a registry confirms it
    CHANGED = "changed"  # refused: another digest than the registry gives, or than the matrix claims
    KEPT = "kept"  # the pin stays: no registry answered, or none was asked
    CLAIMED = "claimed"  # no registry answered, and the claim of the matrix is taken
    MISSING = "missing"  # no registry answered, and there is no claim


class PinLine(Frozen):
    """The pin of a base.

    Attributes:
        before, after: first digest, empty where there is none.
        how: how it was verified, or why not this time.
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
        PinsDamaged: it cannot be read, is not what the verb writes, or a pin does not show what it claims.
    """
    try:
        data = file.read_bytes()
        read_strict_json(data)
        found = Pins(pins=tuple(_File.model_validate_json(data).pins), hash=sha256(data).hexdigest())
        if faults := tuple(_find_faults(found)):
            raise ValueError("; ".join(faults[:4]))
    except FileNotFoundError:
        return Pins()
    except (OSError, ValueError) as fault:  # a ValidationError is a ValueError
        raise PinsDamaged(
            f"{file} is not a valid file of pins: {' '.join(str(fault).split())[:400]}. Likely cause: the file was "
            "edited by hand, or an earlier release of this tool wrote it. Next step: restore it from version control, "
            f"or delete it and let `{WRITER}` write it."
        ) from fault
    return found


def _find_faults(pins: Pins) -> Iterator[str]:
    """Bases that are there twice, and verified pins whose document does not hash to their digests."""
    names = [pin.base for pin in pins.pins]
    yield from (f"the base {name} is there twice" for name in {*names} if names.count(name) > 1)
    for pin in (pin for pin in pins.pins if pin.verified):
        found = f"sha256:{sha256(pin.document.encode()).hexdigest()}"
        index = read_index(pin.document.encode())
        shown = ({"index": found} | index) if index is not None else dict.fromkeys(pin.platform_digests, found)
        if (
            not pin.platform_digests
            or {*pin.digests.items()} - {*shown.items()}
            or (index is None) == bool(pin.index_digest)
        ):
            yield f"{pin.base} has a date of verification, but its document hashes to another digest ({found})"


def read_index(raw: bytes) -> dict[str, str] | None:
    """Platform -> digest of every image of an index; None for one image.

    Raises:
        ValueError: it is no index and no manifest of today.
    """
    try:
        body = read_json(raw.decode())
        if body["schemaVersion"] != 2 or not ("manifests" in body or body["config"]["digest"]):
            raise KeyError("schemaVersion")
        # linux/arm64 means its first variant, v8; attestations are of an unknown platform.
        rows = [row for row in body.get("manifests", ()) if row["platform"]["os"] != "unknown"]
        rows.sort(key=lambda row: row["platform"].get("variant", "") in ("", "v8"))
        found = {f"{row['platform']['os']}/{row['platform']['architecture']}": str(row["digest"]) for row in rows}
    except (KeyError, TypeError, AttributeError) as fault:
        raise ValueError(f"{raw[:60]!r} is not an image manifest: {fault!r}") from fault
    return found if "manifests" in body else None


def render_pins(pins: tuple[Pin, ...]) -> str:
    """The text of the file, in an order that does not depend on when it was written."""
    rows = []
    for pin in sorted(pins, key=lambda pin: pin.base):
        row = pin.model_dump() | {"platform_digests": dict(sorted(pin.platform_digests.items()))}
        rows.append({name: value for name, value in row.items() if value or name != "document"})
    return json.dumps({"generated_by": WRITER, "pins": rows}, indent=2, ensure_ascii=False) + "\n"


def resolve_tag(images: Images, base: Base, today: str, how: str, variables: Mapping[str, str]) -> Pin:
    """What a tag is now; the manifest of every platform is fetched, and hashed.

    Raises:
        NotInRegistry, RegistryLies, RegistryUnreachable: as `tools.read_manifest`.
        ImageRefused: there is no image for one of the platforms.
    """
    repository = use_mirror(base.repository, variables.get(MIRROR, ""))
    platforms = {image.platform for image in images.image if image.base == base.id}
    raw = read_manifest(f"{repository}:{base.tag}", variables)
    digest = f"sha256:{sha256(raw).hexdigest()}"
    try:
        index = read_index(raw)
        for name in sorted(platforms & (index or {}).keys()):
            read_index(read_manifest(f"{repository}@{(index or {})[name]}", variables))
        found = (
            index
            if index is not None
            else dict.fromkeys(read_image(f"{repository}@{digest}", variables).platforms, digest)
        )
        if missing := sorted(platforms - found.keys()):
            raise ImageRefused(
                f"{base.repository}:{base.tag} has no image for {', '.join(missing)}. Likely cause: another base was "
                "meant, or the mirror keeps one platform. Next step: choose another base."
            )
        return Pin(
            base=base.id, repository=base.repository, tag=base.tag, index_digest="" if index is None else digest,
            platform_digests=found, verified=today, how=how, source="registry", document=raw.decode(),
        )  # fmt: skip
    except ValueError as fault:
        raise RegistryLies(
            f"{base.repository}:{base.tag}: {fault}. Likely cause: a login page or a proxy answers, or the registry is "
            "damaged. Next step: use another mirror."
        ) from fault


def pin_bases(
    images: Images, pins: Pins, today: str, accepted: frozenset[str], variables: Mapping[str, str]
) -> tuple[tuple[Pin, PinLine], ...]:
    """The pin of every base that an image uses, and what became of it.

    Args:
        accepted: tags, or ids of bases, whose digest may change.

    Raises:
        RegistryLies, NotInRegistry, ImageRefused: as `resolve_tag`.
    """
    used = _used_bases(images)
    return tuple(_pin_base(images, base, pins, today, bool({base.tag, base.id} & accepted), variables) for base in used)


def _pin_base(
    images: Images, base: Base, pins: Pins, today: str, accepts: bool, variables: Mapping[str, str]
) -> tuple[Pin, PinLine]:  # fmt: skip
    host, mirror = base.repository.partition("/")[0], variables.get(MIRROR, "")
    whom = f"a mirror of {host}" if mirror else host  # the mirror's name is no business of who reads the file
    old, claim = _same_tag(base, pins), claim_pin(images, base)
    known, refusal = old or claim, refuse_unclaimed(images, base, old)
    now, silence, why = None, "", "not verified"
    try:
        if accepts or not refusal:
            now = resolve_tag(images, base, today, f"{whom} gave it for the tag, and its bytes hash to it", variables)
    except (NotInRegistry, RegistryUnreachable) as fault:
        absent = isinstance(fault, NotInRegistry)
        if absent and not mirror:
            raise  # the tag was withdrawn; a mirror may just not have it
        silence, why = f" ({fault})", f"not verified: {whom} {'does not have it' if absent else 'did not answer'}"
    if now is None:
        # What is there stays to the letter: which registry was asked today is nobody else's business.
        pin = old or (claim.model_copy(update={"how": why}) if claim else _empty(base, why))
        kept = PinNews.KEPT if old else PinNews.CLAIMED if claim else PinNews.MISSING
        return pin, _line(base, old, pin, PinNews.CHANGED if refusal else kept, refusal, silence)
    changed = _compare(known, now) if known else ""
    if accepts or not changed:
        return now, _line(base, known if changed else old, now, PinNews.VERIFIED)
    whose = "was verified" if known and known.verified else f"is a claim of {known.source if known else ''}"
    refusal = (
        f"{base.repository}:{base.tag} is another image now: {changed}; the earlier digest {whose}. Likely cause: the "
        f"tag was pushed again, or this is not the intended registry. Next step: find out what changed; then `{WRITER} "
        f"-- --accept {base.tag}`, and commit what it writes."
    )
    return known or now, _line(base, known, now, PinNews.CHANGED, refusal)


def _compare(old: Pin, now: Pin) -> str:
    """The first digest that a registry gives otherwise; additional platforms are no difference."""
    for name in old.digests:
        if old.digests[name] != now.digests.get(name, old.digests[name]):
            return f"{name} {old.digests[name]}, now {now.digests[name]}"
    return "" if old.digests.keys() & now.digests.keys() else f"{_show(old)}, now {_show(now)}"


def check_pins(images: Images, pins: Pins) -> tuple[PinLine, ...]:
    """The pins, compared with the matrix and its claims; no registry is asked."""
    found = []
    for base in _used_bases(images):
        pin = _same_tag(base, pins)
        platforms = [image.platform for image in images.image if image.base == base.id]
        whole = pin is not None and all(pin.digest_for(platform) for platform in platforms)
        news, refusal = PinNews.KEPT if whole else PinNews.MISSING, refuse_unclaimed(images, base, pin)
        found.append(_line(base, pin, pin or _empty(base, "not pinned"), news, refusal))
    return tuple(found)


def refuse_unclaimed(images: Images, base: Base, pin: Pin | None) -> str:
    """Why an unverified pin is refused: its digests are not those of the claim; empty where it is not refused."""
    claim = claim_pin(images, base)
    if pin is None or claim is None or pin.verified or not pin.digests or pin.digests == claim.digests:
        return ""
    return (
        f"the pin of {base.id} ({base.repository}:{base.tag}) is not verified, and is not what the matrix claims: "
        f"{FILE} has {_show(pin)}, matrix/images.toml has {_show(claim)} ({claim.source}). Likely cause: one of them "
        f"was edited by hand. Next step: restore {FILE} from version control, or delete it and run `{WRITER}`; where a "
        f"registry can be reached, `{WRITER} -- --accept {base.tag}` accepts the digest of the registry."
    )


def claim_pin(images: Images, base: Base) -> Pin | None:
    """What the matrix claims of a base; None where nothing."""
    claims = {claim.platform: claim for claim in images.claim if claim.base == base.id}
    if not claims:
        return None
    return Pin(
        base=base.id, repository=base.repository, tag=base.tag,
        index_digest=claims[""].digest if "" in claims else "",
        platform_digests={name: claim.digest for name, claim in claims.items() if name},
        how="as others say", source="; ".join(dict.fromkeys(claim.source for claim in claims.values())),
    )  # fmt: skip


def _used_bases(images: Images) -> list[Base]:
    used = {image.base for image in images.image}
    return [base for base in images.base if base.id in used]


def _show(pin: Pin) -> str:
    return ", ".join(f"{name} {digest}" for name, digest in pin.digests.items())


def _same_tag(base: Base, pins: Pins) -> Pin | None:
    """The pin of a base; a pin of another tag is none of this one, and neither is a pin without digests."""
    pin = pins.find(base.id)
    return pin if pin and pin.digests and (pin.repository, pin.tag) == (base.repository, base.tag) else None


def _empty(base: Base, why: str) -> Pin:
    return Pin(base=base.id, repository=base.repository, tag=base.tag, index_digest="", platform_digests={}, how=why)


def _line(base: Base, old: Pin | None, now: Pin, news: PinNews, refusal: str = "", silence: str = "") -> PinLine:
    before, after = (next(iter(pin.digests.values()), "") if pin else "" for pin in (old, now))
    return PinLine(
        base=base.id, reference=f"{base.repository}:{base.tag}", before=before, after=after, news=news,
        verified=now.verified if news is not PinNews.CHANGED else "", how=now.how + silence, refusal=refusal,
    )  # fmt: skip
