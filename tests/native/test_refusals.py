"""Wrong input to native layers is refused, and the message says what is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_validate.native.grouped_gemm import grouped_gemm
from megacpp_validate.native.mlp import MLP, NormMLP
from megacpp_validate.native.norms import NormLinear, RMSNorm
from megacpp_validate.native.router import TopKRouter


def multiply(split: list[int]) -> Callable[[], Any]:
    return lambda: grouped_gemm(torch.ones(7, 16), torch.ones(2, 24, 16), split)


CASES: list[tuple[Any, str]] = [
    *[(multiply(split), "for 2 experts and rows of shape") for split in ([3, 2, 2], [8, -1], [3, 3])],
    (lambda: MLP(4, 4, activation="swish"), r"no activation is called 'swish'.*gelu, .*swiglu"),  # type: ignore[arg-type]
    (lambda: NormMLP(4, 4, eps=-1.0), "eps is -1.0"),
    *[([lambda eps=eps: RMSNorm(4, eps=eps), lambda eps=eps: NormLinear(4, 4, eps=eps)], "eps is .*number from 0 up")
      for eps in (float("nan"), -1.0, float("inf"), True, "1e-5")],
    (lambda: TopKRouter(6, 5, 2)(torch.ones(1, 7, 6)), r"\[T, 6\].*\(1, 7, 6\)"),
    (lambda: TopKRouter(6, 5, 2)(torch.ones(7, 5)), r"\[T, 6\].*\(7, 5\)"),
]  # fmt: skip


@pytest.mark.parametrize(("calls", "words"), CASES, ids=range(len(CASES)))
def test_wrong_input_is_refused(calls: Any, words: str) -> None:
    for call in calls if isinstance(calls, list) else [calls]:
        with pytest.raises(ValueError, match=words):
            call()
