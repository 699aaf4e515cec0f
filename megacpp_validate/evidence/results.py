"""Every kind of result that a verb gives and a report tells."""

from __future__ import annotations

from .bisect import BisectResult
from .blame_score import BlameScore
from .doctor import DoctorResult
from .findings import StaticResult, Sweep
from .firewall import FirewallResult
from .fp8 import Fp8Result
from .fp8_faults import Fp8FaultScore
from .loss_gate import LossGateResult
from .parity import ParityResult, SupportGrid
from .preset_decision import PolicyResult
from .selftest import SelftestResult
from .smoke import SmokeSession
from .smoke_faults import SmokeFaultScore
from .upgrade import UpgradeResult

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
    | BisectResult
    | BlameScore
    | Fp8FaultScore
    | SmokeFaultScore
    | LossGateResult
    | DoctorResult
    | PolicyResult
)
