"""Every kind of result that a verb gives and a report tells."""

from __future__ import annotations

from ..canary.dynamic.bisect_result import BisectResult
from ..canary.dynamic.blame_score import BlameScore
from ..canary.dynamic.fp8_fault_score import Fp8FaultScore
from ..canary.dynamic.smoke_fault_score import SmokeFaultScore
from ..environments.doctor_result import DoctorResult
from ..environments.session_result import ParityResult, SupportGrid
from ..environments.smoke_session import SmokeSession
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
    | BisectResult
    | BlameScore
    | Fp8FaultScore
    | SmokeFaultScore
    | LossGateResult
    | DoctorResult
    | PolicyResult
)
