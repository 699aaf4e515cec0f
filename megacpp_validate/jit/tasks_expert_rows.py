"""Transformer Engine's kernels for an expert bank in low precision, for every number of rows that a router may give.

It chooses among kernels of a cast or transpose by the shape of the tensor, and has NVRTC compile the one that it chose.
Of a dense layer that shape is the preset's. Of an expert it is the router's, step by step: a run that was prewarmed may
ask for a kernel in its hundredth step that the run before never needed (seen on one H200: four of `cast_transpose`).
The calls are the bridge's own; wants a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from .order import JitOrder, Lacking
from .tasks_deep_gemm import banks

_ROOM = (__package__ or "megacpp_validate.jit").rpartition(".")[0]


def compile_task(order: JitOrder) -> None:
    """Settings: `size` of `training.sizes`; `recipes`, each of which the target of this machine has.

    Raises:
        Lacking: no GPU, or Transformer Engine does not take the calls.
        ValueError: no recipe is named.
    """
    import torch

    if not order.words("recipes"):
        raise ValueError('settings lack recipes. Next step: name those that runs train in: recipes = "delayed".')
    if not torch.cuda.is_available():
        raise Lacking(
            "Transformer Engine compiles these kernels where it launches them: torch sees no CUDA device here"
        )
    scopes, gemms = (importlib.import_module(f"{_ROOM}.bridge.{name}") for name in ("fp8_scope", "expert_gemm"))
    of = importlib.import_module(f"{_ROOM}.training.sizes").read_size(order.setting("size"))
    target = scopes.detect_target()
    torch.manual_seed(order.seed)
    for recipe in order.words("recipes"):
        for experts, inputs, outputs, _ in banks(order):
            bank = gemms.ExpertGemm(
                num_experts=experts, in_features=inputs, out_features=outputs, dtype=torch.bfloat16, device="cuda"
            )
            for counts in row_counts(of.batch * of.length, experts, gemms.FP8_ROWS_ELSE):
                _train(bank, counts, scopes.low_precision(target=target, amax_reduction_group=None, recipe=recipe))
    torch.cuda.synchronize()


def row_counts(tokens: int, experts: int, align: int) -> Iterator[list[int]]:
    """Rows of each expert, call by call, so that every multiple of `align` up to all tokens is some expert's.

    Args:
        tokens: of a step. No token goes to an expert twice, so no expert has more rows.
        experts: of a bank; where numbers run out, the last one is taken again.
        align: to which the bridge pads rows.
    """
    every = [*range(align, tokens + align, align)]
    every += every[-1:] * (-len(every) % experts)
    for first in range(0, len(every), experts):
        yield every[first : first + experts]


def _train(bank: Any, counts: list[int], scope: AbstractContextManager[Any]) -> None:
    """Forward and backward once; the gradients are let go."""
    import torch

    rows = torch.randn(sum(counts), bank.in_features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with scope as entered:
        out = bank(rows, counts)
    if entered.choice.observed != "te" or bank.choice.observed != "te":
        refused = "; ".join(one.reason for one in (*entered.choice.refusals, *bank.choice.refusals))
        raise Lacking(f"Transformer Engine does not take these calls: {refused or 'another backend did'}")
    out.backward(torch.randn_like(out))
    bank.zero_grad(set_to_none=True)
