"""What a session of FP8 observed: a receipt a cell, the loss gate's verdicts, and what the policy says of presets."""

from __future__ import annotations

from typing import Literal

from ..environments.session_result import SessionResult
from .fp8_policy import PolicyResult
from .loss_result import LossOutcome, LossVerdict


class Fp8Result(SessionResult):
    """One session.

    Attributes:
        loss: the loss gate's verdict on each recipe that was trained.
        loss_missing: why there is none, where training was selected; empty where there is one.
        policy: what the policy of low precision says of the presets.
    """

    schema_id: Literal["megacpp-validate/fp8/1"] = "megacpp-validate/fp8/1"
    loss: tuple[LossVerdict, ...] = ()
    loss_missing: str = ""
    policy: PolicyResult | None = None

    @property
    def holds(self) -> bool:
        """Whether every selected cell ran and is good, and so is every verdict on what was trained."""
        verdicts = all(verdict.outcome is LossOutcome.PASS for verdict in self.loss)
        policy = self.policy is None or self.policy.holds
        return super().holds and verdicts and policy and not self.loss_missing

    @property
    def breaks(self) -> bool:
        """Whether anything ran and is not good; curves that cannot be compared are lost evidence."""
        policy = self.policy is not None and not self.policy.holds
        return super().breaks or policy or any(verdict.outcome is LossOutcome.FAIL for verdict in self.loss)
