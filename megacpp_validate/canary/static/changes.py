"""One change as one use of the bridge meets it, before the uses are gathered into findings."""

from __future__ import annotations

from dataclasses import dataclass

from ...evidence.values import Cause, SourceLine
from .findings import ChangeKind, Impact


@dataclass(frozen=True)
class Change:
    """What a comparison of one use found; the fields are those of `Finding`."""

    kind: ChangeKind
    impact: Impact
    cause: Cause = Cause.API
    member: str = ""
    parameter: str = ""
    before: SourceLine | None = None
    after: SourceLine | None = None
    old: str = ""
    new: str = ""
    suggestion: str = ""
    follows: bool = False
