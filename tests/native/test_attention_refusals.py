"""What attention refuses before anything is computed, in both of its paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_validate.native.attention import attention, reference_attention

GOOD = [torch.randn(2, heads, 6, 8, generator=torch.Generator().manual_seed(0)) for heads in (4, 2, 2)]


@pytest.mark.parametrize(
    ("change", "options", "kind", "said"),
    [
        ({"query": GOOD[0][0]}, {}, ValueError, r"takes query \[B, H, T, D\].*transpose\(1, 2\)"),
        ({"key": GOOD[1][:1]}, {}, ValueError, r"key \(1, 2, 6, 8\)"),
        ({"value": GOOD[2][:, :, :5]}, {}, ValueError, r"value \(2, 2, 5, 8\)"),
        ({"query": GOOD[0][..., :4]}, {}, ValueError, r"query \(2, 4, 6, 4\)"),
        ({"query": GOOD[0][:, :3]}, {}, ValueError, "G divides H"),
        ({"key": GOOD[1][:, :0], "value": GOOD[2][:, :0]}, {}, ValueError, "G divides H"),
        ({"value": GOOD[2].double()}, {}, TypeError, "float64; cast them to one"),
        ({}, {"window": 0}, ValueError, "a window of 0"),
        ({}, {"window": 3, "causal": False}, ValueError, "needs causal=True"),
        ({}, {"softcap": 0.0}, ValueError, "soft cap of 0.0"),
        ({}, {"doc_ids": torch.zeros(6, dtype=torch.long)}, ValueError, r"document ids \(6,\)"),
        ({}, {"doc_ids": torch.zeros(2, 6)}, TypeError, "they are integers"),
        ({}, {"doc_ids": torch.zeros(2, 6, device="meta").long()}, ValueError, "on meta"),
        ({"query": GOOD[0][:, :, :3]}, {"doc_ids": torch.zeros(2, 3).long()}, ValueError, "as many keys as queries"),
    ],
)
@pytest.mark.parametrize("path", [attention, reference_attention])
def test_wrong_input_is_refused_with_the_next_step(
    path: Callable[..., Any], change: dict[str, Any], options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    given = dict(zip(("query", "key", "value"), GOOD, strict=True)) | change
    with pytest.raises(kind, match=said):
        path(*given.values(), **options)
