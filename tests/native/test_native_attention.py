"""What native attention hands to SDPA; cells of `attention` and `native_block` hold its numbers to fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacpp_validate.native import attention as module
from megacpp_validate.native.attention import attention

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]] * 2)


@pytest.mark.parametrize(
    ("dtype", "groups", "options", "masked", "grouped"),
    [
        (torch.bfloat16, 1, {}, False, True),
        (torch.bfloat16, 4, {}, False, False),
        (torch.float32, 1, {}, False, False),
        (torch.bfloat16, 1, {"causal": False}, False, True),
        (torch.bfloat16, 1, {"window": 9}, False, True),
        (torch.bfloat16, 1, {"window": 8}, True, False),
        (torch.bfloat16, 1, {"doc_ids": DOCUMENTS}, True, False),
    ],
)
def test_the_kernel_gets_no_mask_that_it_can_spell_and_groups_where_it_knows_them(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, groups: int, options: dict[str, Any], masked: bool, grouped: bool
) -> None:
    """A dense mask would cost it FlashAttention."""
    asked: list[tuple[bool, bool, int]] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def watch(query: Any, key: Any, value: Any, **given: Any) -> Any:
        asked.append((given["attn_mask"] is not None, given["enable_gqa"], key.shape[1]))
        return real(query, key, value, **given)

    monkeypatch.setattr(module.functional, "scaled_dot_product_attention", watch)
    query, key = torch.randn(2, 4, 9, 8, dtype=dtype), torch.randn(2, groups, 9, 8, dtype=dtype)
    attention(query, key, key, **options)
    assert asked == [(masked, grouped, groups if grouped else 4)]


@pytest.mark.parametrize("softcap", [None, 0.5])
def test_the_scale_is_a_factor_on_the_scores(softcap: float | None) -> None:
    query, key, value = torch.randn(3, 2, 4, 9, 16, dtype=torch.float64)
    scaled = attention(query, key, value, scale=0.7, softcap=softcap)
    torch.testing.assert_close(scaled, attention(query * 2.8, key, value, softcap=softcap))
