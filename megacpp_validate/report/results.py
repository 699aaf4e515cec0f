"""Every kind of result that a verb gives and a report tells."""

from __future__ import annotations

from ..environments.session_result import ParityResult, SmokeSession, SupportGrid
from ..evidence.selftest import SelftestResult
from ..gate.fp8_session import Fp8Result
from ..gate.loss_result import LossGateResult
from ..gate.policy_result import PolicyResult

Result = (
    ParityResult
    | Fp8Result
    | SmokeSession
    | SupportGrid
    | SelftestResult
    | LossGateResult
    | PolicyResult
)
