"""An autotuner takes the first configuration that fits, whatever the clock says."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from megacpp_validate.training.smoke.rank import keep_bits


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({"64": [2.0] * 3, "128": [1.0] * 3}, "64"),
        ({"64": [2.0] * 3, "128": 1.0}, "64"),
        ({"64": [math.inf] * 3, "128": [2.0] * 3, "256": [1.0] * 3}, "128"),
    ],
)
def test_the_first_that_fits_wins_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[str, Any], best: str
) -> None:
    """Triton's autotuner as far as it matters: `_bench` answers quantiles, and the least of them wins."""
    module: Any = ModuleType("triton.runtime.autotuner")
    module.Autotuner = type("Autotuner", (), {"_bench": lambda _, config: seconds[config]})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = torch.are_deterministic_algorithms_enabled()
    keep_bits()
    keep_bits()  # a second time changes nothing
    torch.use_deterministic_algorithms(before)
    for _ in range(2):  # also the second kernel of a process
        timings = {config: module.Autotuner()._bench(config) for config in seconds}
        assert min(timings, key=lambda config: timings[config]) == best
