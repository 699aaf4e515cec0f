"""The re-computed state of delayed scaling is that of the real releases' own Python update, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megacpp_validate.probes.emulation import new_state, next_state
from tests.probes.test_emulation import update_of

# Calls by tensors: ordinary, a spike, zeros, and what is not finite, each beside another.
AMAX = [
    [1.0, 0.0, 3.0],
    [2.0, 0.0, math.inf],
    [1000.0, 1e-44, 0.5],
    [0.0, 7.0, 0.0],
    [0.0, 0.3, 0.25],
    *[[1.5, 0.1, 0.125]] * 4,
    [math.nan, 0.2, 0.0],
    *[[1.25, 0.0, 0.0]] * 5,
]


@pytest.mark.parametrize("release", ["2.12.0", "2.20.2"])
@pytest.mark.parametrize(("length", "largest"), [(1, 448.0), (2, 448.0), (4, 57344.0)])
def test_the_python_update(wheel_of: Callable[[str], Path], release: str, length: int, largest: float) -> None:
    fields = {"amax_compute_algo": "max", "scaling_factor_compute_algo": None, "margin": 0}
    recipe, update = type("Recipe", (), fields)(), update_of(wheel_of(release))
    history, scale, state = torch.zeros(length, 3), torch.ones(3), new_state(length, 3)
    for row in AMAX:
        history[0] = torch.tensor(row)
        state = next_state(state, history[0], largest, "python")
        update(history, scale, largest, recipe)
        assert torch.equal(history.double().nan_to_num(-1.0), state.history.nan_to_num(-1.0))
        torch.testing.assert_close(scale.double(), state.scale, rtol=2**-23, atol=0.0)
