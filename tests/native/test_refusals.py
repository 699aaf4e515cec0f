"""Wrong input to native layers is refused, and the message says what is wanted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megacpp_validate.native.grouped_gemm import grouped_gemm
from megacpp_validate.native.mlp import MLP
from megacpp_validate.native.norms import check_eps


def multiply(split: list[int]) -> Callable[[], Any]:
    return lambda: grouped_gemm(torch.ones(7, 16), torch.ones(2, 24, 16), split)


CASES: list[tuple[Any, str]] = [
    *[(multiply(split), "for 2 experts and rows of shape") for split in ([3, 2, 2], [8, -1], [3, 3])],
    (lambda: MLP(4, 4, activation="swish"), r"no activation is called 'swish'.*gelu, .*swiglu"),  # type: ignore[arg-type]
    *[(partial(check_eps, eps), "eps is .*number from 0 up")
      for eps in (float("nan"), -1.0, float("inf"), True, "1e-5")],
]  # fmt: skip


@pytest.mark.parametrize(("calls", "words"), CASES, ids=range(len(CASES)))
def test_wrong_input_is_refused(calls: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        calls()
