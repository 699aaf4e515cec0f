"""Wrong input to native layers is refused, and the message says what is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_validate.native.attention import rope_tables
from megacpp_validate.native.block import ABlock
from megacpp_validate.native.grouped_gemm import grouped_gemm
from megacpp_validate.native.mamba import Mamba2Mixer
from megacpp_validate.native.mlp import MLP, NormMLP
from megacpp_validate.native.norms import NormLinear, RMSNorm
from megacpp_validate.native.recurrent import MatrixRecurrentBlock
from megacpp_validate.native.router import TopKRouter


def multiply(split: list[int], width: int = 16, dtype: Any = torch.float64) -> Callable[[], Any]:
    weight = torch.ones(2, 24, 16, dtype=torch.float64)
    return lambda: grouped_gemm(torch.ones(7, width, dtype=dtype), weight, split)


CASES: list[tuple[Any, str]] = [
    (lambda: rope_tables(4, 7), "head size of 7.*use an even head size"),
    (lambda: rope_tables(4, 0), "head size of 0"),
    (lambda: ABlock(24, 40, 8, 6, 3), r"8 query heads cannot share 3.*must divide"),
    (lambda: ABlock(24, 40, 8, 6, 2)(torch.ones(11, 24)), r"takes rows \[B, T, hidden\]; it was given \(11, 24\)"),
    (multiply([3, 4], width=15), r"rows \[R, K\].*\(7, 15\)"),
    (multiply([3, 4], dtype=torch.float32), r"of one dtype.*float32 and .*float64"),
    (multiply([3, 2, 2]), r"3 numbers of rows for 2 experts"),
    (multiply([8, -1]), r"\[8, -1\] sum to 7"),
    (multiply([3, 3]), r"\[3, 3\] sum to 6"),
    (lambda: Mamba2Mixer(8, state=4, head_dim=5), r"16 \(2 \* 8\) with heads of 5"),
    (lambda: Mamba2Mixer(8, state=4, head_dim=4, groups=3), r"4, 3 groups"),
    (lambda: Mamba2Mixer(8, state=4, head_dim=4)(torch.zeros(2, 8)), r"\[B, T, 8\] and got \(2, 8\)"),
    (lambda: MatrixRecurrentBlock(8, num_heads=3, key_dim=4, value_dim=5)(torch.zeros(2, 8)), r"\[B, T, 8\] and got"),
    (lambda: MLP(4, 4, activation="swish"), r"no activation is called 'swish'.*gelu, .*swiglu"),  # type: ignore[arg-type]
    (lambda: NormMLP(4, 4, eps=-1.0), "eps is -1.0"),
    *[([lambda eps=eps: RMSNorm(4, eps=eps), lambda eps=eps: NormLinear(4, 4, eps=eps)], "eps is .*number from 0 up")
      for eps in (float("nan"), -1.0, float("inf"), True, "1e-5")],
    (lambda: TopKRouter(6, 5, 2)(torch.ones(1, 7, 6)), r"\[T, 6\].*\(1, 7, 6\)"),
    (lambda: TopKRouter(6, 5, 2)(torch.ones(7, 5)), r"\[T, 6\].*\(7, 5\)"),
    *[(lambda top_k=top_k: TopKRouter(6, 5, top_k), f"top_k is {top_k} with 5 experts") for top_k in (0, 6)],
]  # fmt: skip


@pytest.mark.parametrize(("calls", "words"), CASES, ids=range(len(CASES)))
def test_wrong_input_is_refused(calls: Any, words: str) -> None:
    for call in calls if isinstance(calls, list) else [calls]:
        with pytest.raises(ValueError, match=words):
            call()
