"""Every kind of result that a verb gives and a report tells."""

from __future__ import annotations

from ..evidence.selftest import SelftestResult
from ..gate.fp8_policy import PolicyResult

