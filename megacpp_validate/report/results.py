"""Every kind of result that a verb gives and a report tells."""

from __future__ import annotations

from ..canary.dynamic.bisect_result import BisectResult
from ..canary.dynamic.blame_score import BlameScore
from ..canary.dynamic.fp8_fault_score import Fp8FaultScore
from ..canary.dynamic.smoke_fault_score import SmokeFaultScore
from ..evidence.selftest import SelftestResult
from ..gate.fp8_policy import PolicyResult

Result = SelftestResult | BisectResult | BlameScore | Fp8FaultScore | SmokeFaultScore | PolicyResult
