"""Goes with `smoke-faults` of the first edition."""

from __future__ import annotations

from collections.abc import Mapping

from ...catalog.bridge import Target
from ...environments import host_session
from ...environments.fleet import Expected
from ...environments.host_session import Plan
from ...environments.host_session import SessionOptions as Asked
from ...environments.session_result import SessionResult
from ..progress import CellProgress

__all__ = ["Asked", "Plan", "run_session"]


def run_session(
    target: Target, asked: Asked, plan: Plan, expected: Mapping[str, Expected] | None = None
) -> SessionResult:
    """Run what `plan` gives."""
    with CellProgress() as progress:
        return host_session.run_session(target, asked, plan, progress, expected)
