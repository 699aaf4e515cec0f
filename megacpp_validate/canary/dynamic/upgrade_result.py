"""What the dynamic tier observed between two stacks on one target, and who is to blame for it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ...diagnosis.blame import Change
from ...diagnosis.culprits import Culprit
from ...diagnosis.next_steps import VersionChange
from ...environments.host_session import SupportGrid
from ...environments.stacks import StackRun
from ...errors import Exit, exit_for
from ...evidence.receipt import Outcome
from ...evidence.values import Frozen
from ..firewall.result import FirewallResult
from ..static.findings import StaticResult


class ModuleChange(Frozen):
    """One bridge module between two stacks.

    Attributes:
        before, after: outcomes; None where there is no receipt that can be believed.
        signature: of the failure that is seen now; empty where there is none.
        under: the culprit that it is filed under; empty where it is none's cascade.
        reason: what the receipt says now.
    """

    module: str
    before: Outcome | None
    after: Outcome | None
    change: Change
    signature: str = ""
    under: str = ""
    reason: str = ""


class TimingChange(Frozen):
    """One timed use of a module on either side, beside the noise of the card.

    Attributes:
        ratio: after / before; above 1 is slower.
        noise: ratio that two runs of one stack on this card are apart by, at the most that is to be believed.
        slower: beyond that noise.
        derivation: where `noise` comes from.
    """

    module: str
    name: str
    before_ms: float
    after_ms: float
    ratio: float
    noise: float
    slower: bool
    derivation: str


class StepResult(Frozen):
    """The step from one stack to another on one target.

    Attributes:
        modules: in dependency order, then compositions by name.
        culprits: in dependency order; nobody where nothing regressed.
        timings: every use that was timed on both sides.
        versions: what else than the release changed.
        lost: cells without evidence now, each with why. Lost evidence is never a pass.
    """

    schema_id: Literal["megacpp-validate/step/1"] = "megacpp-validate/step/1"
    target: str
    before: str
    after: str
    modules: tuple[ModuleChange, ...]
    culprits: tuple[Culprit, ...] = ()
    timings: tuple[TimingChange, ...] = ()
    versions: tuple[VersionChange, ...] = ()
    lost: dict[str, str] = Field(default_factory=dict)

    @property
    def breaks(self) -> bool:
        """Whether somebody is to blame."""
        return bool(self.culprits)


class UpgradeResult(Frozen):
    """Everything that was asked of two releases or more, over the tiers that were asked for.

    Attributes:
        tiers: "static", "firewall", "gpu", in that order.
        static, firewall: None where the tier was not asked for.
        grid: stacks x modules; None without the dynamic tier.
        stacks: those of the dynamic tier, oldest first.
        steps: between adjacent stacks of the dynamic tier.
        seconds: wall-clock time of each tier.
        unmade: not one of the environments of the dynamic tier could be made.
    """

    schema_id: Literal["megacpp-validate/upgrade/1"] = "megacpp-validate/upgrade/1"
    tool: str
    target: str
    tiers: tuple[str, ...]
    static: tuple[StaticResult, ...] = ()
    firewall: FirewallResult | None = None
    grid: SupportGrid | None = None
    stacks: tuple[StackRun, ...] = ()
    steps: tuple[StepResult, ...] = ()
    seconds: dict[str, float] = Field(default_factory=dict)
    unmade: bool = False

    @property
    def breaks(self) -> bool:
        """Whether any tier found somebody to blame."""
        firewall = self.firewall is not None and self.firewall.breaks
        return firewall or any(result.breaks for result in self.static) or any(step.breaks for step in self.steps)

    @property
    def lacks(self) -> bool:
        """Whether evidence that was asked for is missing."""
        stacks = any(stack.problem for stack in self.stacks) or any(step.lost for step in self.steps)
        unreadable = self.grid is not None and bool(self.grid.unreadable)
        static = any(result.lacks for result in self.static)
        return static or stacks or unreadable or (self.firewall is not None and not self.firewall.holds)

    @property
    def exit(self) -> Exit:
        """A breakage before evidence that is missing, and that before an environment that could not be made."""
        if self.unmade and not self.breaks and (self.firewall is None or self.firewall.holds):
            return Exit.NO_ENVIRONMENT
        return exit_for(breaks=self.breaks, lacks=self.lacks)


__all__ = ["Change", "Culprit", "ModuleChange", "StepResult", "TimingChange", "UpgradeResult", "VersionChange"]
