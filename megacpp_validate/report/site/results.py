"""Results of other verbs that lie beside receipts: the page that their own verb would write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeGuard

from ...canary.dynamic.upgrade_result import UpgradeResult
from ...canary.firewall.result import FirewallResult
from ...canary.static.findings import StaticResult, Sweep
from ...environments.session_result import ParityResult, SmokeSession
from ...gate.fp8_session import Fp8Result
from ...gate.loss_result import LossGateResult
from ...gate.policy_result import PolicyResult
from .. import loss_report
from ..describe.firewall import describe_firewall
from ..describe.static import describe_static, describe_sweep
from ..describe.upgrade import describe_upgrade
from ..html import pages as html
from ..html import policy as html_policy
from ..render.html import render_html
from ..results import Result

MOST_RESULTS: Final = 40  # that get a page; a session of many receipts is a MB
_RENDERERS: Final[Mapping[type[Any], Callable[[Any], str]]] = {
    StaticResult: lambda result: render_html(describe_static(result)),
    Sweep: lambda result: render_html(describe_sweep(result)),
    FirewallResult: lambda result: render_html(describe_firewall(result)),
    ParityResult: html.render_session_html,
    Fp8Result: html.render_session_html,
    SmokeSession: html.render_session_html,
    UpgradeResult: lambda result: render_html(describe_upgrade(result)),
    LossGateResult: loss_report.render_losses_html,
    PolicyResult: html_policy.render_policy_html,
}


def has_page(result: object) -> TypeGuard[Result]:
    """Whether it is a result that its verb tells as a page."""
    return type(result) in _RENDERERS


def render_result(result: Result) -> str:
    """The page of a result that has one."""
    return _RENDERERS[type(result)](result)
