"""The emulation that the recorded curves come from casts as `probes.emulation` does, and its faults are faults."""

from __future__ import annotations

import pytest
import torch
from train_curves import HISTORY, LEVELS, Quantizer, cast

from megacpp_validate.probes.emulation import LARGEST, FormatName, round_to_fp8


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", [1.0, 37.7, 2.0**-20])
def test_the_fast_cast_is_that_of_the_emulation(name: FormatName, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-9, 6, (20_000,), generator=generator)
    values = torch.randn(20_000, generator=generator) * 10.0**exponents
    values = torch.cat([values, torch.arange(-500, 500) / 16.0, torch.zeros(1)])[None]
    assert torch.equal(cast(values, name, scale), round_to_fp8(values, name, scale=scale).float())


def test_the_gauge_needs_e4m3() -> None:
    levels = torch.arange(LEVELS[0], LEVELS[1] + 1) / LEVELS[1]
    assert torch.allclose(cast(levels, "e4m3", LARGEST["e4m3"]), levels)
    assert len(set(cast(levels, "e5m2", LARGEST["e5m2"]).tolist())) < len(levels)


def forget(fault: str) -> list[float]:
    """Scales after a spike of 1000, and after as many steps of 1 as the history is long."""
    quantizer = Quantizer("e5m2", "delayed", fault)
    scales = []
    for amax in (1000.0, *[1.0] * HISTORY):
        quantizer(torch.tensor([amax]))
        quantizer.roll()
        scales.append(quantizer.scale)
    return [scales[0], scales[HISTORY - 1], scales[HISTORY]]


def test_the_history_forgets_a_spike_after_its_length_and_the_planted_one_does_not() -> None:
    spiked, calm = LARGEST["e5m2"] / 1000, LARGEST["e5m2"]
    assert forget("none") == [spiked, spiked, calm]
    assert forget("no_roll") == [spiked, spiked, spiked]
    assert forget("frozen") == [1.0, 1.0, 1.0]
