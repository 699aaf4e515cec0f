"""The rotary embedding rounds once and gives contiguous heads; cells of `native_block` hold its gradient."""

from __future__ import annotations

import pytest
import torch

from megacpp_validate.bridge.fused import turn_heads
from megacpp_validate.native.attention import apply_rope, rope_tables

B, T, H, D = 2, 9, 3, 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("table", [torch.float32, torch.float64])
def test_it_is_the_rotation_rounded_once(dtype: torch.dtype, table: torch.dtype) -> None:
    """Bound: half a unit in the last place of what is written, and three roundings of what is computed in."""
    cos, sin = rope_tables(T + 3, D, dtype=table)
    mixed = torch.randn(B, T, (H + 2) * D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = mixed.to(dtype)[..., : H * D].unflatten(-1, (H, D))  # a view, as of a projection of query, key and value
    turned = turn_heads(rows, cos, sin)
    wanted = apply_rope(rows.double().transpose(1, 2), cos.double(), sin.double()).transpose(1, 2)
    assert turned.dtype == dtype
    assert turned.is_contiguous()
    wide = torch.promote_types(dtype, table)
    bound = 2.0 * float(rows.abs().max()) * (torch.finfo(dtype).eps / 2 + 3 * torch.finfo(wide).eps)
    assert float((turned.double() - wanted).abs().max()) <= bound
