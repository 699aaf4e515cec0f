"""In which dtype rows are summed; cells of `permute` hold rows, paddings, chunks and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megacpp_validate.native.permute import permute, unpermute


class SumDtypes(TorchDispatchMode):
    """Keeps the dtype of every index_add: a CPU's adds up in fp32 whatever its dtype, a GPU's does not."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "index_add" in str(func):
            self.seen.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_low_precision_rows_are_summed_in_fp32_both_ways() -> None:
    tokens = torch.ones(3, 4, dtype=torch.bfloat16, requires_grad=True)
    routing_map = torch.ones(3, 512, dtype=torch.bool)
    with SumDtypes() as sums:
        rows, _, row_ids = permute(tokens, None, routing_map)
        merged = unpermute(rows, row_ids, num_tokens=3)
        merged.sum().backward()
    assert sums.seen == [torch.float32, torch.float32]
