"""A result in Markdown, for the page of a run."""

from __future__ import annotations

from typing import assert_never

from megacpp_validate.evidence.selftest import SelftestResult

from ...canary.dynamic.bisect_result import BisectResult
from ...canary.dynamic.blame_score import BlameScore
from ...canary.dynamic.fp8_fault_score import Fp8FaultScore
from ...canary.dynamic.smoke_fault_score import SmokeFaultScore
from ...gate.fp8_policy import PolicyResult
from ..results import Result
from .bisect import tell_bisect
from .blame_score import tell_blame_score
from .fp8_faults import tell_fp8_faults
from .policy import tell_policy
from .selftest import tell_selftest
from .smoke_faults import tell_smoke_faults


def render_step_summary(result: Result) -> str:
    """The result as GitHub-flavoured Markdown, for the page of a run."""
    match result:
        case SelftestResult() | BlameScore() | Fp8FaultScore() | SmokeFaultScore():
            lines = _tell_score(result)
        case BisectResult():
            lines = tell_bisect(result)
        case PolicyResult():
            lines = tell_policy(result)
        case _:
            assert_never(result)
    return "\n".join(lines) + "\n"


def _tell_score(result: SelftestResult | BlameScore | Fp8FaultScore | SmokeFaultScore) -> list[str]:
    match result:
        case SelftestResult():
            return tell_selftest(result)
        case BlameScore():
            return tell_blame_score(result)
        case Fp8FaultScore():
            return tell_fp8_faults(result)
        case SmokeFaultScore():
            return tell_smoke_faults(result)
        case _:
            assert_never(result)
