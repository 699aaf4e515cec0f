"""What `nox -s lock` found and wrote: digests of bases and packages of locks, before and after."""

from __future__ import annotations

from enum import StrEnum

from ..evidence.values import Frozen
from .fit_result import StackFit


class PinNews(StrEnum):
    """What became of the pin of a base."""

    SAME = "same"  # a registry gives the digest that is pinned
    NEW = "new"  # there was no pin for this tag
    ACCEPTED = "accepted"  # a registry gives another digest, and the caller accepts it
    CHANGED = "changed"  # a registry gives another digest: refused
    KEPT = "kept"  # no registry answered, and what was there stays
    CLAIMED = "claimed"  # no registry answered, and what others say of it is taken
    MISSING = "missing"  # no registry answered, and nobody says anything


class PinLine(Frozen):
    """The pin of a base.

    Attributes:
        base: row of matrix/images.toml.
        reference: "repository:tag".
        before, after: digest; empty for none.
        verified: day on which a registry gave it; empty where none has.
        how: how it was verified, or why it was not.
        silence: why no registry could say it this time; empty where one did, or none was asked.
    """

    base: str
    reference: str
    before: str
    after: str
    news: PinNews
    verified: str
    how: str
    silence: str = ""


class PackageLine(Frozen):
    """A package whose lock changes.

    Attributes:
        before, after: version; empty where it is not in that lock.
        files: whether the same version comes from other files than before.
    """

    name: str
    before: str
    after: str
    files: bool = False


class LockLine(Frozen):
    """A lock.

    Attributes:
        target: of the image; "sessions" for the constraints of nox sessions.
        file: relative to the project.
        stale: why it has to be written; empty where it need not.
        count: packages in it.
        packages: what changes in it.
    """

    target: str
    file: str
    stale: str
    count: int
    packages: tuple[PackageLine, ...] = ()


class LockResult(Frozen):
    """The answer.

    Attributes:
        tool: name and version.
        check: whether it was to be looked at alone.
        pins, locks: a line a base, and a lock.
        fits: whether what is locked fits together.
        refusals: why nothing was written; in words.
        written: files, relative to the project.
    """

    tool: str
    check: bool
    pins: tuple[PinLine, ...] = ()
    locks: tuple[LockLine, ...] = ()
    fits: tuple[StackFit, ...] = ()
    refusals: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def stale(self) -> bool:
        """Whether a file is not what the matrix says."""
        return any(line.stale for line in self.locks) or any(
            line.news in (PinNews.NEW, PinNews.CLAIMED, PinNews.MISSING) for line in self.pins
        )
