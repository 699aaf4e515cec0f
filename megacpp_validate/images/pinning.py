"""Which digest a base is pinned to: what a registry says, held against what is pinned. A tag that moved is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from ..catalog_images import Base, Images
from ..evidence.lock_result import PinLine, PinNews
from .pins import FILE, WRITER, Pin, Pins
from .plan import show_through
from .refusals import NotInRegistry, RegistryUnreachable
from .registry import Resolved


class Resolver(Protocol):
    """What asks a registry; `registry.RegistryClient` is one."""

    def resolve(self, repository: str, reference: str, platforms: tuple[str, ...] = ()) -> Resolved:
        """What a tag is now."""


@dataclass(frozen=True)
class Pinned:
    """A pin that is to be written, the line that tells of it, and why it is refused; empty where it is not."""

    pin: Pin
    line: PinLine
    refusal: str


@dataclass(frozen=True)
class _Asked:
    today: str
    accepted: frozenset[str]
    mirror: str


def pin_bases(
    images: Images, pins: Pins, resolver: Resolver, today: str, accepted: frozenset[str], mirror: str
) -> tuple[Pinned, ...]:
    """The pin of every base that an image stands on.

    Args:
        today: as in "2026-11-22".
        accepted: tags, or ids of bases, whose digest may be another one now.
        mirror: registry that stands in for every other; empty for none.

    Raises:
        RegistryLies: a registry answered with what its digest is not.
        NotInRegistry: the registry has no such tag.
        ImageRefused: it has no image for a platform.
    """
    used = {image.base for image in images.image}
    asked = _Asked(today, accepted, mirror)
    return tuple(
        _pin_base(images, base, pins.find(base.id), resolver, asked) for base in images.base if base.id in used
    )


def check_pins(images: Images, pins: Pins) -> tuple[PinLine, ...]:
    """The pins as they are, held against the matrix; no registry is asked."""
    found = []
    for base in images.base:
        pin = _of_this_tag(base, pins.find(base.id))
        platforms = [image.platform for image in images.image if image.base == base.id]
        whole = pin is not None and all(pin.digest_for(platform) for platform in platforms)
        if platforms:
            news = PinNews.KEPT if whole else PinNews.MISSING
            found.append(_line(base, pin, pin or _empty(base, "not pinned"), news))
    return tuple(found)


def check_claims(images: Images, pins: Pins) -> tuple[str, ...]:
    """Why a pin that no registry has verified cannot be: the matrix claims another digest. No registry is asked."""
    used = {image.base for image in images.image}
    told = (_say_unclaimed(images, base, _of_this_tag(base, pins.find(base.id))) for base in images.base)
    return tuple(words for base, words in zip(images.base, told, strict=True) if words and base.id in used)


def _say_unclaimed(images: Images, base: Base, pin: Pin | None) -> str:
    """Such a pin stands on a claim alone: it has the digests of the claim, none other and none more."""
    claim = _claimed(images, base)
    if pin is None or claim is None or pin.verified or not _digests(pin) or _digests(pin) == _digests(claim):
        return ""
    return (
        f"the pin of {base.id} ({base.repository}:{base.tag}) is not verified, and is not what the matrix claims: "
        f"{FILE} has {_show(_digests(pin))}, matrix/images.toml has {_show(_digests(claim))} ({claim.source}). Likely "
        f"cause: one of them was edited by hand. Next step: take {FILE} from version control, or delete it and run "
        f"`{WRITER}`; where a registry can be reached, `{WRITER} -- --accept {base.tag}` takes its word."
    )


def _pin_base(images: Images, base: Base, before: Pin | None, resolver: Resolver, asked: _Asked) -> Pinned:
    platforms = tuple(dict.fromkeys(image.platform for image in images.image if image.base == base.id))
    host = base.repository.partition("/")[0]
    whom = f"a mirror of {host}" if asked.mirror else host  # its name is no business of who reads the file
    old = _of_this_tag(base, before)
    old = old if old and _digests(old) else None
    known = old or _claimed(images, base)
    forged = _say_unclaimed(images, base, old)
    accepted = bool({base.tag, base.id} & asked.accepted)
    if old and forged and not accepted:
        return Pinned(old, _line(base, _claimed(images, base), old, PinNews.CHANGED), forged)
    try:
        answer = resolver.resolve(show_through(base.repository, asked.mirror), base.tag, platforms)
    except (NotInRegistry, RegistryUnreachable) as fault:
        absent = isinstance(fault, NotInRegistry)
        if absent and not asked.mirror:
            raise  # the tag was withdrawn; a mirror may just not have it
        why = f"not verified: {whom} {'does not have it' if absent else 'did not answer'}"
        if known is None:
            none = _empty(base, why)
            return Pinned(none, _line(base, old, none, PinNews.MISSING), "")
        if forged:
            return Pinned(known, _line(base, _claimed(images, base), known, PinNews.CHANGED), f"{why}; {forged}")
        kept = known if known.verified else replace(known, how=why)
        return Pinned(kept, _line(base, old, kept, PinNews.KEPT if old else PinNews.CLAIMED), "")
    how = f"{whom} gave it for the tag, and its bytes hash to it"
    now = Pin(
        base.id, base.repository, base.tag, answer.index_digest, answer.platform_digests, asked.today, how, "registry"
    )
    changed = _first_difference(known, now) if known else ""
    if not changed:
        return Pinned(now, _line(base, old, now, PinNews.SAME if old else PinNews.NEW), "")
    if accepted:
        return Pinned(now, _line(base, known, now, PinNews.ACCEPTED), "")
    whose = "was verified" if known and known.verified else f"is what others say ({known.source if known else ''})"
    refusal = (
        f"{base.repository}:{base.tag} is another image now: {changed}; the first {whose}. Likely cause: the tag was "
        "pushed again, or the registry is not the one that you think. Next step: find out what changed; then "
        f"`nox -s lock -- --accept {base.tag}`, and commit what it writes."
    )
    return Pinned(known or now, _line(base, known, now, PinNews.CHANGED), refusal)


def _claimed(images: Images, base: Base) -> Pin | None:
    """What others say of the tag; None where nobody does."""
    claims = {claim.platform: claim for claim in images.claim if claim.base == base.id}
    if not claims:
        return None
    return Pin(
        base=base.id,
        repository=base.repository,
        tag=base.tag,
        index_digest=claims[""].digest if "" in claims else "",
        platform_digests={name: claim.digest for name, claim in claims.items() if name},
        how="as others say",
        source="; ".join(dict.fromkeys(claim.source for claim in claims.values())),
    )


def _first_difference(old: Pin, now: Pin) -> str:
    """What a registry says otherwise; what it says more of is no difference."""
    before, after = _digests(old), _digests(now)
    shared = [name for name in before if name in after]
    for name in shared:
        if before[name] != after[name]:
            return f"{name} {before[name]}, now {after[name]}"
    if before and not shared:
        return f"{_show(before)}, now {_show(after)}"
    return ""


def _digests(pin: Pin) -> dict[str, str]:
    index = {"index": pin.index_digest} if pin.index_digest else {}
    return index | dict(pin.platform_digests)


def _show(digests: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {digest}" for name, digest in digests.items())


def _of_this_tag(base: Base, pin: Pin | None) -> Pin | None:
    """A pin of another tag says nothing of this one."""
    return pin if pin and (pin.repository, pin.tag) == (base.repository, base.tag) else None


def _empty(base: Base, why: str) -> Pin:
    return Pin(base.id, base.repository, base.tag, "", {}, how=why)


def _line(base: Base, old: Pin | None, now: Pin, news: PinNews) -> PinLine:
    before, after = (_digests(pin) if pin else {} for pin in (old, now))
    return PinLine(
        base=base.id,
        reference=f"{base.repository}:{base.tag}",
        before=next(iter(before.values()), ""),
        after=next(iter(after.values()), ""),
        news=news,
        verified=now.verified if news is not PinNews.CHANGED else "",
        how=now.how,
    )
