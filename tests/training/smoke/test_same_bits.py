"""An autotuner takes the first configuration that fits, whatever the clock says."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from megacpp_validate.training.smoke.rank import keep_bits


class Autotuner:
    """Triton's, as far as it matters: `_bench` answers quantiles, and the least of them wins."""

    def __init__(self, seconds: dict[str, Any]) -> None:
        self.seconds = seconds

    def _bench(self, *_: Any, config: str, **__: Any) -> Any:
        return self.seconds[config]

    def best(self) -> str:
        timings = {config: self._bench(config=config) for config in self.seconds}
        return min(timings, key=lambda config: timings[config])


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> type[Autotuner]:
    module = ModuleType("triton.runtime.autotuner")
    module.Autotuner = type("Autotuner", (Autotuner,), {"_bench": Autotuner._bench})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.Autotuner  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def kept(tuner: type[Autotuner]) -> Any:
    before = torch.are_deterministic_algorithms_enabled()
    keep_bits()
    keep_bits()  # a second time changes nothing
    yield tuner
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("of_second", [[1.0] * 3, [3.0] * 3, 1.0])
def test_the_first_wins_whatever_the_clock_says(kept: type[Autotuner], of_second: Any) -> None:
    for _ in range(2):  # also the second kernel of a process
        assert kept({"64": [2.0] * 3, "128": of_second}).best() == "64"


def test_one_that_does_not_fit_is_not_taken(kept: type[Autotuner]) -> None:
    assert kept({"64": [math.inf] * 3, "128": [2.0] * 3, "256": [1.0] * 3}).best() == "128"
