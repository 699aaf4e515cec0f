"""Rotary embedding against complex rotation in fp64 and against the real rope.py of Transformer Engine."""

from __future__ import annotations

import cmath
from typing import Any

import pytest
import torch

from megacpp_validate.native.attention import apply_rope, rope_tables
from megacpp_validate.probes.bounds import Roundings, compare


def turn(x: Any, base: float = 10000.0) -> Any:
    """Channel j + i x channel (j + D/2), times exp(i x angle)."""
    width, length = x.shape[-1], x.shape[-2]
    rotations = torch.tensor(
        [[cmath.exp(1j * t * base ** (-2 * j / width)) for j in range(width // 2)] for t in range(length)],
        dtype=torch.complex128,
    ).reshape(length, width // 2)
    turned = torch.complex(x[..., : width // 2], x[..., width // 2 :]) * rotations
    return torch.cat((turned.real, turned.imag), dim=-1)


def make(*shape: int, dtype: Any = torch.float64, seed: int = 0) -> Any:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=source, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("width", [2, 64, 128])
@pytest.mark.parametrize("length", [1, 33])
@pytest.mark.parametrize("base", [10000.0, 5e5])
def test_it_is_a_complex_rotation(width: int, length: int, base: float) -> None:
    x = make(2, 3, length, width)
    cos, sin = rope_tables(length + 2, width, base=base, dtype=torch.float64)
    assert cos.shape == sin.shape == (length + 2, width // 2)
    seen = apply_rope(x, cos, sin)
    torch.testing.assert_close(seen, turn(x, base), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_low_precision_rounds_once_forward_and_backward(name: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]
    x, upstream = make(2, 2, 65, 64, dtype=dtype), make(2, 2, 65, 64, dtype=dtype, seed=1)
    low, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    seen, wanted = apply_rope(low, *rope_tables(65, 64)), turn(exact)
    seen.backward(upstream)
    wanted.backward(upstream.double())
    # Tables, two products and a sum in fp32; then the result.
    roundings = Roundings((("fp32", 4), (name, 1)), 2)
    assert seen.dtype == dtype
    assert compare("out", seen, wanted, roundings=roundings).passed
    assert compare("gradient", low.grad, exact.grad, roundings=roundings).passed


def test_tables_hold_far_out() -> None:
    cos, sin = rope_tables(131072, 64)
    assert cos.dtype == sin.dtype == torch.float32
    for channel in range(32):
        wanted = cmath.exp(1j * 131071 * 10000.0 ** (-channel / 32))
        # Half a unit in the last place of fp32, and what fp64 leaves of an angle of 1.3e5.
        assert abs(complex(cos[-1, channel], sin[-1, channel]) - wanted) < 2**0.5 * 2.0**-25 + 2.0**-34
