"""A run as one line of JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from ..evidence.selftest import SelftestRun


def run_line(run: SelftestRun) -> str:
    """The run as JSON, with a line end. JSON has no NaN and no Inf: such a number becomes null."""
    return json.dumps(_finite(asdict(run)), ensure_ascii=True, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
