"""Digests of base images: each is a row of matrix/images.toml, and `nox -s lock` compares it with the registry."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from ..catalog.images import Images
from ..evidence.values import Frozen
from .tools import MIRROR, RegistryUnreachable, read_digest, use_mirror


class PinNews(StrEnum):
    """What a registry says of the digest of a base."""

    VERIFIED = "verified"  # the tag has it
    CHANGED = "changed"  # refused: the tag has another one
    KEPT = "kept"  # no registry was asked, or none answers


class PinLine(Frozen):
    """The digest of a base.

    Attributes:
        before, after: digest of the matrix, and the one that the tag has.
        verified: day on which a registry confirmed the digest, as the matrix has it.
        how: why no registry was asked; empty where one answered.
        refusal: why nothing is written; empty where the digests are one.
    """

    base: str
    reference: str
    before: str
    after: str
    news: PinNews = PinNews.KEPT
    verified: str
    how: str = ""
    refusal: str = ""


def read_pins(images: Images, variables: Mapping[str, str] | None = None) -> tuple[PinLine, ...]:
    """A row a base that an image uses; compared with its registry where `variables` are given.

    Raises:
        ImageRefused: the registry does not have the tag.
    """
    used = {image.base for image in images.image}
    lines = []
    for base in (base for base in images.base if base.id in used):
        name = f"{base.repository}:{base.tag}"
        line = PinLine(base=base.id, reference=name, before=base.digest, after=base.digest, verified=base.verified)
        if variables is not None:
            try:
                mirrored = f"{use_mirror(base.repository, variables.get(MIRROR, ''))}:{base.tag}"
                line = _compare(line, read_digest(mirrored, variables))
            except RegistryUnreachable as fault:
                line = line.model_copy(update={"how": str(fault)})
        lines.append(line)
    return tuple(lines)


def _compare(line: PinLine, now: str) -> PinLine:
    if line.before == now:
        return line.model_copy(update={"news": PinNews.VERIFIED})
    refusal = (
        f"{line.reference} is another image now: {line.before} is {now}. Likely cause: the tag was pushed again, or "
        "this is not the intended registry. Next step: find out what changed; then write the digest to the base "
        f"{line.base} of matrix/images.toml, and commit it."
    )
    return line.model_copy(update={"news": PinNews.CHANGED, "after": now, "refusal": refusal})
