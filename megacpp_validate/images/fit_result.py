"""Whether the parts of a stack fit the release of Transformer Engine that is to run on them: known before a build."""

from __future__ import annotations

from enum import StrEnum

from ..evidence.values import Frozen


class FitVerdict(StrEnum):
    """What is known of one need; in this order."""

    REFUSED = "refused"  # it does not work
    UNKNOWN = "unknown"  # nobody has said which version there is: it may or may not
    WARNED = "warned"  # it works with less
    FITS = "fits"

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(FitVerdict).index(self)


class Part(Frozen):
    """A component of a stack.

    Attributes:
        version: empty where it is there and its version is not known.
        brought_by: the base, the lock, or who asks.
    """

    name: str
    version: str
    brought_by: str


class Fit(Frozen):
    """One need, held against a stack.

    Attributes:
        need: row of matrix/images.toml or matrix/needs.toml.
        component: what is needed.
        seen: its version there, or that it is not there; in words.
        wanted: range.
        says: what needs it.
        breaks: bridge modules that fail by it, in dependency order.
        next_step: what to do.
        source: where it is known from.
    """

    need: str
    component: str
    seen: str
    wanted: str
    verdict: FitVerdict
    says: str
    breaks: tuple[str, ...] = ()
    next_step: str
    source: str


class StackFit(Frozen):
    """A stack, and every need that the release has, worst first.

    Attributes:
        name: target of the image, or "asked" for a stack that was given in words.
        te: release of Transformer Engine; empty where none is in it.
    """

    name: str
    te: str
    parts: tuple[Part, ...]
    fits: tuple[Fit, ...]

    def of(self, verdict: FitVerdict) -> tuple[Fit, ...]:
        """The needs with one verdict."""
        return tuple(fit for fit in self.fits if fit.verdict is verdict)

    @property
    def refused(self) -> bool:
        """Whether anything does not work."""
        return bool(self.of(FitVerdict.REFUSED))


class FitResult(Frozen):
    """Several stacks, and how long the look took."""

    tool: str
    stacks: tuple[StackFit, ...]
    seconds: float = 0.0
