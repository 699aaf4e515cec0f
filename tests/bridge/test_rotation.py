"""Both forms of the rotary embedding round once, and one gives contiguous heads; `native_block` holds gradients."""

from __future__ import annotations

import pytest
import torch

from megacpp_validate.bridge.fused import turn_heads
from megacpp_validate.native.attention import apply_rope, rope_tables
from megacpp_validate.probes.bounds import Roundings, compare

B, T, H, D = 2, 9, 3, 8
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("table", [torch.float32, torch.float64])
def test_it_is_the_rotation_rounded_once(dtype: torch.dtype, table: torch.dtype) -> None:
    """Tables, two products and a sum in what is computed in; then the result."""
    cos, sin = rope_tables(T + 3, D, dtype=table)
    mixed = torch.randn(B, T, (H + 2) * D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = mixed.to(dtype)[..., : H * D].unflatten(-1, (H, D))  # a view, as of a projection of query, key and value
    turned = turn_heads(rows, cos, sin)
    wanted = apply_rope(rows.double().transpose(1, 2), cos.double(), sin.double()).transpose(1, 2)
    plain = apply_rope(rows.transpose(1, 2), cos, sin)
    assert turned.dtype == plain.dtype == dtype
    assert turned.is_contiguous()
    roundings = Roundings(((NAMES[torch.promote_types(dtype, table)], 4), (NAMES[dtype], 1)), 2)
    for seen in (turned, plain.transpose(1, 2)):
        check = compare("turned", seen, wanted, roundings=roundings)
        assert check.passed, check.detail
