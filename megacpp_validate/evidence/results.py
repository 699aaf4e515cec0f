"""Every kind of result that a verb gives and a report tells."""

from __future__ import annotations

from .findings import StaticResult, Sweep
from .firewall import FirewallResult
from .parity import ParityResult, SupportGrid
from .selftest import SelftestResult
from .upgrade import UpgradeResult

Result = StaticResult | Sweep | FirewallResult | ParityResult | SupportGrid | SelftestResult | UpgradeResult
