"""Rotary tables against complex numbers; `tests.bridge.test_fused` and cells of `native_block` hold the turn."""

from __future__ import annotations

import cmath

import pytest
import torch

from megacpp_validate.native.attention import rope_tables


@pytest.mark.parametrize("width", [2, 128])
@pytest.mark.parametrize("base", [10000.0, 5e5])
def test_tables_hold_the_angle_of_each_position(width: int, base: float) -> None:
    tables = torch.complex(*rope_tables(33, width, base=base, dtype=torch.float64))
    wanted = [[cmath.exp(1j * t * base ** (-2 * j / width)) for j in range(width // 2)] for t in range(33)]
    torch.testing.assert_close(tables, torch.tensor(wanted, dtype=torch.complex128), rtol=1e-12, atol=1e-12)


def test_tables_hold_far_out() -> None:
    cos, sin = rope_tables(131072, 64)
    assert cos.dtype == sin.dtype == torch.float32
    for channel in range(32):
        wanted = cmath.exp(1j * 131071 * 10000.0 ** (-channel / 32))
        # Half a unit in the last place of fp32, and what fp64 leaves of an angle of 1.3e5.
        assert abs(complex(cos[-1, channel], sin[-1, channel]) - wanted) < 2**0.5 * 2.0**-25 + 2.0**-34
