"""The rotary embedding: `native.attention.apply_rope` gives, forward and backward, from any layout."""

from __future__ import annotations

import pytest
import torch

from megacpp_validate.bridge.fused import turn_heads
from megacpp_validate.native.attention import apply_rope, rope_tables

B, T, H, D = 2, 9, 3, 8


def heads(dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """Query as a projection of query, key and value gives it: a view of every other column block."""
    mixed = torch.randn(B, T, H * D + 2 * D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return mixed.to(dtype)[..., : H * D].unflatten(-1, (H, D)).requires_grad_()


def reference(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return apply_rope(rows.double().transpose(1, 2), cos.double(), sin.double()).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("table", [torch.float32, torch.float64])
def test_it_is_the_rotation_rounded_once(dtype: torch.dtype, table: torch.dtype) -> None:
    """Bound: half a unit in the last place of what is written, and three roundings of what is computed in."""
    cos, sin = rope_tables(T + 3, D, dtype=table)
    rows, exact = heads(dtype), heads(dtype)
    turned, wanted = turn_heads(rows, cos, sin), reference(exact, cos, sin)
    gradient = torch.randn(turned.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    turned.backward(gradient)
    wanted.backward(gradient.double())
    assert turned.dtype == dtype
    assert turned.is_contiguous()
    wide = torch.promote_types(dtype, table)
    for found, right, size in ((turned, wanted, rows), (rows.grad, exact.grad, gradient)):
        most = 2.0 * float(size.detach().abs().max())
        bound = most * (torch.finfo(dtype).eps / 2 + 3 * torch.finfo(wide).eps)
        # The gradient that reaches the rows of the reference is rounded to their dtype there.
        bound += most * torch.finfo(dtype).eps / 2
        assert float((found.detach().double() - right.detach().double()).abs().max()) <= bound
