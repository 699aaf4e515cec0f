"""A result in Markdown, for the page of a run."""

from __future__ import annotations

from typing import assert_never

from megacpp_validate.evidence.selftest import SelftestResult

from .policy import tell_policy


def render_step_summary(result: Result) -> str:
    """The result as GitHub-flavoured Markdown, for the page of a run."""
    match result:
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
