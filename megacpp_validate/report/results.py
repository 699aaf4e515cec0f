"""Every kind of result that a verb gives and a report tells."""

from __future__ import annotations

from ..canary.dynamic.upgrade_result import UpgradeResult
from ..canary.firewall.result import FirewallResult
from ..canary.static.findings import StaticResult, Sweep
from ..environments.doctor_result import DoctorResult
from ..environments.session_result import ParityResult, SmokeSession, SupportGrid
from ..evidence.selftest import SelftestResult
from ..gate.fp8_session import Fp8Result
from ..gate.loss_result import LossGateResult
from ..gate.policy_result import PolicyResult

Result = (
    StaticResult
    | Sweep
    | FirewallResult
    | ParityResult
    | Fp8Result
    | SmokeSession
    | SupportGrid
    | SelftestResult
    | UpgradeResult
    | LossGateResult
    | DoctorResult
    | PolicyResult
)
