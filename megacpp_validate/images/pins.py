"""Digests of base images: `containers/pins.json`, what a registry says of a tag, and what the matrix claims.

A pin that a registry verified keeps the registry's document, whose hash is the digest: nobody can write a day down
without it. A pin that no registry has verified must be what a [[claim]] of the matrix says.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Final

from pydantic import ConfigDict, Field

from ..catalog.images import Base, Images
from ..evidence.strict_json import read_json, read_strict_json
from ..evidence.values import Frozen
from .tools import MIRROR, ImageRefused, NotInRegistry, Registry, RegistryLies, RegistryUnreachable, use_mirror

FILE: Final = "containers/pins.json"
WRITER: Final = "nox -s lock"
_KINDS: Final = tuple(
    f"application/vnd.{kind}+json"
    for kind in (
        "oci.image.index.v1", "docker.distribution.manifest.list.v2", "oci.image.manifest.v1",
        "docker.distribution.manifest.v2",
    )
)  # fmt: skip
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

    SAME = "same"
    NEW = "new"
    ACCEPTED = "accepted"  # the registry gives another digest, and the caller accepts it
    CHANGED = "changed"  # the registry gives another digest: refused
    KEPT = "kept"  # no registry answered, and the pin stays
    CLAIMED = "claimed"  # no registry answered, and the claim of the matrix is taken
    MISSING = "missing"  # no registry answered, and there is no claim


class PinLine(Frozen):
    """The pin of a base: digest before and after, and `silence`: why no registry could say it this time."""

    base: str
    reference: str
    before: str
    after: str
    news: PinNews
    verified: str
    how: str
    silence: str = ""


class Pinned(Frozen):
    """A pin that is to be written, its line, and why it is refused; empty where it is not."""

    pin: Pin
    line: PinLine
    refusal: str = ""


def read_pins(file: Path, today: date | None = None) -> Pins:
    """The pins of a file; none where there is no file.

    Raises:
        PinsDamaged: it cannot be read, is not what the verb writes, or a pin does not show what it claims.
    """
    try:
        data = file.read_bytes()
        read_strict_json(data)
        found = Pins(pins=tuple(_File.model_validate_json(data).pins), hash=sha256(data).hexdigest())
    except FileNotFoundError:
        return Pins()
    except (OSError, ValueError) as fault:  # a ValidationError is a ValueError
        raise _damaged(file, " ".join(str(fault).split())[:400]) from fault
    if faults := tuple(_find_faults(found, today or datetime.now(UTC).date())):
        raise _damaged(file, "; ".join(faults[:4]))
    return found


def _damaged(file: Path, words: str) -> PinsDamaged:
    return PinsDamaged(
        f"{file} is no file of pins: {words}. Likely cause: somebody edited it, or an earlier release of this tool "
        f"wrote it. Next step: restore it from version control, or delete it and let `{WRITER}` write it."
    )


def _find_faults(pins: Pins, today: date) -> Iterator[str]:
    counts = Counter(pin.base for pin in pins.pins)
    yield from (f"the base {name} is there {number} times" for name, number in counts.items() if number > 1)
    for pin in pins.pins:
        if pin.verified and (fault := _find_doubt(pin, today)):
            yield f"{pin.base} says that a registry verified it on {pin.verified}, and {fault}"


def _find_doubt(pin: Pin, today: date) -> str:
    """Why a pin cannot have been verified as it says; empty where its document shows that it was."""
    try:
        if date.fromisoformat(pin.verified) > today + timedelta(days=1):  # a clock may be of another zone
            return "that day has not come yet"
    except ValueError:
        return "there is no such day"
    try:
        index = _read_index(pin.document.encode())
    except ValueError:
        return "does not show what the registry gave"
    found = f"sha256:{sha256(pin.document.encode()).hexdigest()}"
    if index is None:
        right = not pin.index_digest and [*pin.platform_digests.values()] == [found]
        return "" if right else f"what it shows hashes to {found}"
    if pin.index_digest != found:
        return f"what it shows hashes to {found}"
    strange = [name for name, digest in pin.platform_digests.items() if index.get(name) != digest]
    if strange or not pin.platform_digests:
        return f"the index that it shows has another image for {', '.join(strange) or 'every platform'}"
    return ""


def _read_index(raw: bytes) -> dict[str, str] | None:
    """Platform -> digest of every image of an index; None for one image.

    Raises:
        ValueError: it is no index and no manifest of today.
    """
    body = read_json(raw.decode())
    if not isinstance(body, dict) or body.get("schemaVersion") != 2 or body.get("mediaType", _KINDS[0]) not in _KINDS:
        raise ValueError(f"the registry gives {raw[:60]!r}, which is no manifest of an image")
    found: dict[str, str] = {}
    try:
        rows = body["manifests"] if "manifests" in body else [body["config"]]
        for row in rows:
            if not str(row["digest"]).startswith("sha256:") or len(row["digest"]) != 71:
                raise ValueError(f"{row['digest']!r} is no digest")
        if "manifests" not in body:
            return None
        # linux/arm64 means its first variant, v8; attestations are of an unknown platform.
        for row in sorted(rows, key=lambda row: row["platform"].get("variant", "") not in ("", "v8")):
            if row["platform"]["os"] != "unknown":
                found.setdefault(f"{row['platform']['os']}/{row['platform']['architecture']}", row["digest"])
    except (KeyError, TypeError, AttributeError) as fault:
        raise ValueError(f"the registry gives an index that cannot be read: {fault!r}") from fault
    return found


def render_pins(pins: tuple[Pin, ...]) -> str:
    """The text of the file, in an order that does not depend on when it was written."""
    rows = []
    for pin in sorted(pins, key=lambda pin: pin.base):
        row = pin.model_dump() | {"platform_digests": dict(sorted(pin.platform_digests.items()))}
        rows.append({name: value for name, value in row.items() if value or name != "document"})
    return json.dumps({"generated_by": WRITER, "pins": rows}, indent=2, ensure_ascii=False) + "\n"


def resolve_tag(base: Base, platforms: tuple[str, ...], reader: Registry, today: str, how: str) -> Pin:
    """What a tag is now; the image of every platform is fetched, and hashed.

    Raises:
        NotInRegistry, RegistryLies, RegistryUnreachable: as `tools.Registry.read_manifest`.
        ImageRefused: there is no image for one of the platforms.
    """
    raw = reader.read_manifest(base.tag)
    try:
        index, digest = _read_index(raw), f"sha256:{sha256(raw).hexdigest()}"
        found = index or {}
        for name in platforms:
            if name in found:
                _read_index(reader.read_manifest(found[name]))
        if index is None:
            config = read_json(reader.read_blob(read_json(raw)["config"]["digest"]))
            found = {f"{config['os']}/{config['architecture']}": digest}
    except (ValueError, KeyError, TypeError) as fault:
        raise RegistryLies(
            f"{base.repository}:{base.tag}: {fault}. Likely cause: a login page or a proxy answers, or the registry is "
            "damaged. Next step: ask another mirror."
        ) from fault
    if missing := [name for name in platforms if name not in found]:
        raise ImageRefused(
            f"{base.repository}:{base.tag} has no image for {', '.join(missing)}; it has {', '.join(found) or 'none'}. "
            "Likely cause: another base was meant, or the mirror keeps one platform. Next step: choose another base."
        )
    return Pin(
        base=base.id, repository=base.repository, tag=base.tag, index_digest="" if index is None else digest,
        platform_digests=found, verified=today, how=how, source="registry", document=raw.decode(),
    )  # fmt: skip


def pin_bases(
    images: Images, pins: Pins, today: str, accepted: frozenset[str], variables: Mapping[str, str]
) -> tuple[Pinned, ...]:
    """The pin of every base that an image uses.

    Args:
        accepted: tags, or ids of bases, whose digest may change.

    Raises:
        RegistryLies, NotInRegistry, ImageRefused: as `resolve_tag`.
    """
    mirror, used = variables.get(MIRROR, ""), {image.base for image in images.image}
    found = []
    for base in (one for one in images.base if one.id in used):
        reader = Registry(use_mirror(base.repository, mirror), variables)
        found.append(_pin_base(images, base, pins, reader, (today, accepted, mirror)))
    return tuple(found)


def _pin_base(images: Images, base: Base, pins: Pins, reader: Registry, how: tuple[str, frozenset[str], str]) -> Pinned:
    today, accepted, mirror = how
    platforms = tuple(dict.fromkeys(image.platform for image in images.image if image.base == base.id))
    host = base.repository.partition("/")[0]
    whom = f"a mirror of {host}" if mirror else host  # the mirror's name is no business of who reads the file
    old, claim = _same_tag(base, pins), claim_pin(images, base)
    known, forged = old or claim, refuse_unclaimed(images, base, old)
    accepts = bool({base.tag, base.id} & accepted)
    if old and forged and not accepts:
        return Pinned(pin=old, line=_line(base, claim, old, PinNews.CHANGED), refusal=forged)
    try:
        now = resolve_tag(base, platforms, reader, today, f"{whom} gave it for the tag, and its bytes hash to it")
    except (NotInRegistry, RegistryUnreachable) as fault:
        absent = isinstance(fault, NotInRegistry)
        if absent and not mirror:
            raise  # the tag was withdrawn; a mirror may just not have it
        why = f"not verified: {whom} {'does not have it' if absent else 'did not answer'}"
        if known is None:
            none = _empty(base, why)
            return Pinned(pin=none, line=_line(base, None, none, PinNews.MISSING, str(fault)))
        # What is there stays to the letter: which registry was asked today is nobody else's business.
        kept = old or known.model_copy(update={"how": why})
        news = PinNews.CHANGED if forged else PinNews.KEPT if old else PinNews.CLAIMED
        return Pinned(
            pin=kept, line=_line(base, old, kept, news, str(fault)), refusal=f"{why}; {forged}" if forged else ""
        )
    changed = _compare(known, now) if known else ""
    if not changed or accepts:
        news = PinNews.ACCEPTED if changed else PinNews.SAME if old else PinNews.NEW
        return Pinned(pin=now, line=_line(base, known if changed else old, now, news))
    whose = "was verified" if known and known.verified else f"is what others say ({known.source if known else ''})"
    refusal = (
        f"{base.repository}:{base.tag} is another image now: {changed}; the first {whose}. Likely cause: somebody "
        "pushed the tag again, or the registry is not the one that you think. Next step: find out what changed; then "
        f"`{WRITER} -- --accept {base.tag}`, and commit what it writes."
    )
    return Pinned(pin=known or now, line=_line(base, known, now, PinNews.CHANGED), refusal=refusal)


def _compare(old: Pin, now: Pin) -> str:
    """The first digest that a registry gives otherwise; additional platforms are no difference."""
    shared = [name for name in old.digests if name in now.digests]
    for name in shared:
        if old.digests[name] != now.digests[name]:
            return f"{name} {old.digests[name]}, now {now.digests[name]}"
    return "" if shared or not old.digests else f"{_show(old)}, now {_show(now)}"


def check_pins(images: Images, pins: Pins) -> tuple[PinLine, ...]:
    """The pins, compared with the matrix; no registry is asked."""
    found = []
    for base in images.base:
        pin = _same_tag(base, pins)
        platforms = [image.platform for image in images.image if image.base == base.id]
        whole = pin is not None and all(pin.digest_for(platform) for platform in platforms)
        if platforms:
            news = PinNews.KEPT if whole else PinNews.MISSING
            found.append(_line(base, pin, pin or _empty(base, "not pinned"), news))
    return tuple(found)


def check_claims(images: Images, pins: Pins) -> tuple[str, ...]:
    """Why unverified pins are refused: the matrix claims other digests. No registry is asked."""
    used = {image.base for image in images.image}
    rows = (refuse_unclaimed(images, base, _same_tag(base, pins)) for base in images.base if base.id in used)
    return tuple(filter(None, rows))


def refuse_unclaimed(images: Images, base: Base, pin: Pin | None) -> str:
    """Why an unverified pin is refused: its digests are not those of the claim; empty where it is not refused."""
    claim = claim_pin(images, base)
    if pin is None or claim is None or pin.verified or not pin.digests or pin.digests == claim.digests:
        return ""
    return (
        f"the pin of {base.id} ({base.repository}:{base.tag}) is not verified, and is not what the matrix claims: "
        f"{FILE} has {_show(pin)}, matrix/images.toml has {_show(claim)} ({claim.source}). Likely cause: somebody "
        f"edited one of them. Next step: restore {FILE} from version control, or delete it and run `{WRITER}`; where "
        f"a registry can be reached, `{WRITER} -- --accept {base.tag}` takes its word."
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


def _show(pin: Pin) -> str:
    return ", ".join(f"{name} {digest}" for name, digest in pin.digests.items())


def _same_tag(base: Base, pins: Pins) -> Pin | None:
    """The pin of a base; the pin of another tag says nothing of this one, and neither does one without digests."""
    pin = pins.find(base.id)
    return pin if pin and pin.digests and (pin.repository, pin.tag) == (base.repository, base.tag) else None


def _empty(base: Base, why: str) -> Pin:
    return Pin(base=base.id, repository=base.repository, tag=base.tag, index_digest="", platform_digests={}, how=why)


def _line(base: Base, old: Pin | None, now: Pin, news: PinNews, silence: str = "") -> PinLine:
    before, after = (next(iter(pin.digests.values()), "") if pin else "" for pin in (old, now))
    return PinLine(
        base=base.id, reference=f"{base.repository}:{base.tag}", before=before, after=after, news=news,
        verified=now.verified if news is not PinNews.CHANGED else "", how=now.how, silence=silence,
    )  # fmt: skip
