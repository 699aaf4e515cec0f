"""A result in Markdown, for the page of a run."""

from __future__ import annotations

from typing import assert_never

from megacpp_validate.evidence.selftest import SelftestResult

from ...environments.session_result import ParityResult, SmokeSession, SupportGrid
from ...gate.fp8_session import Fp8Result
from ...gate.loss_result import LossGateResult
from ...gate.policy_result import PolicyResult
from ..results import Result
from .loss import tell_losses
from .parity import tell_session, tell_support
from .policy import tell_policy


def render_step_summary(result: Result) -> str:
    """The result as GitHub-flavoured Markdown, for the page of a run."""
    match result:
        case ParityResult() | Fp8Result() | SmokeSession():
            lines = tell_session(result)
        case SupportGrid():
            lines = tell_support(result)
        case LossGateResult():
            lines = tell_losses(result)
        case PolicyResult():
            lines = tell_policy(result)
        case _:
            assert_never(result)
    return "\n".join(lines) + "\n"
