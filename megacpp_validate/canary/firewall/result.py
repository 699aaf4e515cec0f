"""What the firewall tier observed: one damaged install, one process, one outcome."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from ...errors import Exit, exit_for
from ...evidence.values import Frozen


class FirewallOutcome(StrEnum):
    """How one case ended."""

    PASS = "pass"  # noqa: S105 - an outcome, not a password
    FAIL = "fail"
    NOT_RUN = "not-run"


class FirewallCase(Frozen):
    """One damaged install and what the bridge made of it.

    Attributes:
        case: id, "undefined-symbol".
        damage: what was done to the install, in words.
        release: the Transformer Engine release whose wheel was laid out.
        compiled: "real", "stand-in" (its compiled halves cannot load on this host) or "none".
        outcome: pass only if every bridge module imported, the verdict was the expected one and the reason says what
            the case must say.
        available: what `is_te_available()` answered; None if the process never answered.
        reason: `why_te_is_unavailable()`, or the missing entry's reason.
        native_paths: bridge module -> the native path that it names.
        ended: "exit", "killed after N s" or "signal N": how the process ended.
        problems: what was not as expected; empty on a pass.
    """

    case: str
    damage: str
    release: str
    compiled: str
    outcome: FirewallOutcome
    available: bool | None = None
    reason: str = ""
    native_paths: dict[str, str] = Field(default_factory=dict)
    ended: str = ""
    seconds: float = 0.0
    problems: tuple[str, ...] = ()


class FirewallResult(Frozen):
    """The firewall tier's answer on one host."""

    schema_id: Literal["megacpp-validate/firewall/1"] = "megacpp-validate/firewall/1"
    tool: str
    python: str
    torch: str
    cases: tuple[FirewallCase, ...]

    @property
    def holds(self) -> bool:
        """Whether every case ran and passed."""
        return bool(self.cases) and all(case.outcome is FirewallOutcome.PASS for case in self.cases)

    @property
    def breaks(self) -> bool:
        """Whether a case ran and failed."""
        return any(case.outcome is FirewallOutcome.FAIL for case in self.cases)

    @property
    def exit(self) -> Exit:
        """Closed by a case that fails; a case that was not run is no pass."""
        return exit_for(breaks=self.breaks, lacks=not self.holds)
