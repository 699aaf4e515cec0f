"""Which digest a base is pinned to: what a registry says, held against what is pinned. A tag that moved is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from ..catalog.images import Base, Images
from .claims import claim_pin, keep_same_tag, list_digests, say_unclaimed, show_digests
from .lock_result import PinLine, PinNews
from .pins import Pin, Pins
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
        pin = keep_same_tag(base, pins.find(base.id))
        platforms = [image.platform for image in images.image if image.base == base.id]
        whole = pin is not None and all(pin.digest_for(platform) for platform in platforms)
        if platforms:
            news = PinNews.KEPT if whole else PinNews.MISSING
            found.append(_line(base, pin, pin or _empty(base, "not pinned"), news))
    return tuple(found)


def _pin_base(images: Images, base: Base, before: Pin | None, resolver: Resolver, asked: _Asked) -> Pinned:
    platforms = tuple(dict.fromkeys(image.platform for image in images.image if image.base == base.id))
    host = base.repository.partition("/")[0]
    whom = f"a mirror of {host}" if asked.mirror else host  # its name is no business of who reads the file
    old = keep_same_tag(base, before)
    old = old if old and list_digests(old) else None
    known = old or claim_pin(images, base)
    forged = say_unclaimed(images, base, old)
    accepted = bool({base.tag, base.id} & asked.accepted)
    if old and forged and not accepted:
        return Pinned(old, _line(base, claim_pin(images, base), old, PinNews.CHANGED), forged)
    try:
        answer = resolver.resolve(show_through(base.repository, asked.mirror), base.tag, platforms)
    except (NotInRegistry, RegistryUnreachable) as fault:
        absent = isinstance(fault, NotInRegistry)
        if absent and not asked.mirror:
            raise  # the tag was withdrawn; a mirror may just not have it
        why = f"not verified: {whom} {'does not have it' if absent else 'did not answer'}"
        if known is None:
            none = _empty(base, why)
            return Pinned(none, _line(base, old, none, PinNews.MISSING, str(fault)), "")
        if forged:
            line = _line(base, claim_pin(images, base), known, PinNews.CHANGED, str(fault))
            return Pinned(known, line, f"{why}; {forged}")
        # What is there stays as it is, to the letter: which registry was asked today is nobody else's business.
        kept = old or replace(known, how=why)
        return Pinned(kept, _line(base, old, kept, PinNews.KEPT if old else PinNews.CLAIMED, str(fault)), "")
    how = f"{whom} gave it for the tag, and its bytes hash to it"
    now = Pin(
        base=base.id,
        repository=base.repository,
        tag=base.tag,
        index_digest=answer.index_digest,
        platform_digests=answer.platform_digests,
        verified=asked.today,
        how=how,
        source="registry",
        document=answer.document,
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


def _first_difference(old: Pin, now: Pin) -> str:
    """What a registry says otherwise; what it says more of is no difference."""
    before, after = list_digests(old), list_digests(now)
    shared = [name for name in before if name in after]
    for name in shared:
        if before[name] != after[name]:
            return f"{name} {before[name]}, now {after[name]}"
    if before and not shared:
        return f"{show_digests(before)}, now {show_digests(after)}"
    return ""


def _empty(base: Base, why: str) -> Pin:
    return Pin(base.id, base.repository, base.tag, "", {}, how=why)


def _line(base: Base, old: Pin | None, now: Pin, news: PinNews, silence: str = "") -> PinLine:
    before, after = (list_digests(pin) if pin else {} for pin in (old, now))
    return PinLine(
        base=base.id,
        reference=f"{base.repository}:{base.tag}",
        before=next(iter(before.values()), ""),
        after=next(iter(after.values()), ""),
        news=news,
        verified=now.verified if news is not PinNews.CHANGED else "",
        how=now.how,
        silence=silence,
    )
