"""What others say of a digest: a pin that no registry has verified stands on it alone, and is held to it."""

from __future__ import annotations

from collections.abc import Mapping

from ..catalog.images import Base, Images
from .pins import FILE, WRITER, Pin, Pins


def check_claims(images: Images, pins: Pins) -> tuple[str, ...]:
    """Why a pin that no registry has verified cannot be: the matrix claims another digest. No registry is asked."""
    used = {image.base for image in images.image}
    told = (say_unclaimed(images, base, keep_same_tag(base, pins.find(base.id))) for base in images.base)
    return tuple(words for base, words in zip(images.base, told, strict=True) if words and base.id in used)


def say_unclaimed(images: Images, base: Base, pin: Pin | None) -> str:
    """Why a pin that nobody has verified is refused: it has other digests than the claim, or more; empty where not."""
    claim = claim_pin(images, base)
    if (
        pin is None
        or claim is None
        or pin.verified
        or not list_digests(pin)
        or list_digests(pin) == list_digests(claim)
    ):
        return ""
    return (
        f"the pin of {base.id} ({base.repository}:{base.tag}) is not verified, and is not what the matrix claims: "
        f"{FILE} has {show_digests(list_digests(pin))}, matrix/images.toml has {show_digests(list_digests(claim))} "
        f"({claim.source}). Likely cause: one of them was edited by hand. Next step: take {FILE} from version control, "
        f"or delete it and run `{WRITER}`; where a registry can be reached, `{WRITER} -- --accept {base.tag}` takes "
        "its word."
    )


def claim_pin(images: Images, base: Base) -> Pin | None:
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


def list_digests(pin: Pin) -> dict[str, str]:
    """The digest of each platform, and of the "index" over them where there is one."""
    index = {"index": pin.index_digest} if pin.index_digest else {}
    return index | dict(pin.platform_digests)


def show_digests(digests: Mapping[str, str]) -> str:
    """Digests in a line."""
    return ", ".join(f"{name} {digest}" for name, digest in digests.items())


def keep_same_tag(base: Base, pin: Pin | None) -> Pin | None:
    """A pin of another tag says nothing of this one."""
    return pin if pin and (pin.repository, pin.tag) == (base.repository, base.tag) else None
