"""What a gate is asked, and what it holds of one receipt while it decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from ..evidence.receipt import Receipt
from ..evidence.release_gate import BREAKAGES, GateRule

DIRTY: Final = "-dirty"  # behind a commit from which files differed


@dataclass(frozen=True)
class Asked:
    """What is judged.

    Attributes:
        stack: id.
        at: time of the decision; the gate has no clock of its own.
        tool: that decides.
        commit, image, lock: that receipts must carry; empty for whatever they carry, but the same in all.
    """

    stack: str
    at: datetime
    tool: str = ""
    commit: str = ""
    image: str = ""
    lock: str = ""


_DISOWNING: Final = frozenset({GateRule.STACK, GateRule.TARGET, GateRule.AGE, GateRule.SCHEMA})


@dataclass(frozen=True)
class SignedFolder:
    """What somebody signed of a store.

    Attributes:
        signer: who; empty where there is no signature by one who may.
        hashes: file -> SHA-256, as it was signed.
        problem: why there is none.
    """

    signer: str = ""
    hashes: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Baseline:
    """What speed and memory are compared with.

    Attributes:
        stack: id.
        receipts: by probe, those that are good.
        sha256: of the manifest of its store.
    """

    stack: str
    receipts: Mapping[str, Receipt]
    sha256: str


@dataclass(frozen=True)
class Reason:
    """Why a receipt is rejected.

    Attributes:
        hard: no waiver holds it off: an import, NaN or Inf, or no evidence.
        component: below Transformer Engine that it is about; empty where it is none.
    """

    rule: GateRule
    text: str
    hard: bool = False
    component: str = ""

    @property
    def disowns(self) -> bool:
        """Whether it says that the receipt is of something else, so that whatever it shows is no breakage of this."""
        return self.rule in _DISOWNING

    @property
    def breaks(self) -> bool:
        """Whether it is a breakage, and not a want of evidence."""
        return self.rule in BREAKAGES
