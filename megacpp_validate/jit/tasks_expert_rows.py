"""Transformer Engine's kernels for an expert bank with one scale a tensor, whatever a router makes of it.

Where every expert has rows, all are cast by one kernel that comes compiled (delayed scaling). An expert without any has
them cast one by one, as current scaling always does, and a cast is chosen by its tensor's shape and compiled by NVRTC
when it is first asked for: a run that was prewarmed may ask in its hundredth step for one that the run before never
needed (`multi_tensor_quantize_impl` of its torch extension and `cast_transpose` of 2.20.2; seen on one H200). Of dense
layers that shape is the preset's; of an expert it is what the router gave it. A number of rows that 32 does not divide
is cast by a kernel that comes compiled. The calls are the bridge's own; wants a GPU.

Hopper alone: where a product in FP8 takes rows as they lie (`nvte_is_non_tn_fp8_gemm_supported`: 10.x, 11.x), nothing
is transposed, and what casts comes compiled.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

from .driver_cache import name_driver_kernels
from .monitor import unwatched
from .order import JitOrder, Lacking
from .tasks_deep_gemm import banks

_ROOM = (__package__ or "megacpp_validate.jit").rpartition(".")[0]
_SWITCH: Final = "NVTE_DISABLE_NVRTC"  # of Transformer Engine: kernels that come compiled alone
_KERNEL: Final = "cast_transpose_optimized_kernel"
_FORMATS: Final = ("e4m3", "e5m2")  # of what goes forward, and of gradients
# Files a format that a sweep leaves at least, two a kernel. By the rule that chooses one (`KernelConfig` of
# common/transpose/cast_transpose.cu) it leaves six kernels forward and seven backward on 132 SMs, and weights one.
_FEWEST: Final = 6
_OFF: Final = ("", "0")  # as Transformer Engine reads its switch: empty is not set


def compile_task(order: JitOrder) -> None:
    """Settings: `size`, a name of `training.sizes`; `recipes` with one scale a tensor that this machine's target has.

    Raises:
        Lacking: no GPU, or Transformer Engine does not take the calls.
        ValueError: no recipe is named.
        RuntimeError: the calls did not reach those kernels.
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
    if "transformer_engine" not in unwatched():  # before CUDA 12.9 it compiles in memory, which no cache keeps
        require_kernels(name_driver_kernels())


def row_counts(tokens: int, experts: int, align: int) -> Iterator[list[int]]:
    """Rows of each expert, call by call: every multiple of `align` up to all tokens is some expert's.

    In every call the first expert has none, so that the others are cast one by one.

    Args:
        tokens: of a step. No token goes to an expert twice, so no expert has more rows.
        experts: of a bank; two at least. The last call is filled up with the largest number.
        align: to which the bridge pads rows.
    """
    every = [*range(align, tokens + align, align)]
    busy = experts - 1
    every += every[-1:] * (-len(every) % busy)
    for first in range(0, len(every), busy):
        yield [0, *every[first : first + busy]]


def require_kernels(kernels: list[str]) -> None:
    """Refuse a sweep that left no kernels of several shapes behind, whether it compiled or found them.

    Args:
        kernels: names of those in the driver's cache of this process, one a file.

    Raises:
        RuntimeError: too few, or Transformer Engine is told to compile none.
    """
    if os.environ.get(_SWITCH, "") not in _OFF:
        raise RuntimeError(f"{_SWITCH} keeps Transformer Engine from compiling these kernels. Next step: unset it.")
    seen = {name: sum(_KERNEL in kernel and name in kernel for kernel in kernels) for name in _FORMATS}
    if min(seen.values()) < _FEWEST:
        told = " and ".join(f"{seen[name]} of {name}" for name in _FORMATS)
        raise RuntimeError(
            f"the driver's cache holds {told} of the files of {_KERNEL}, and every number of rows wants {_FEWEST} or "
            "more of each. Likely cause: this release casts experts' rows by other kernels. Next step: look which ones "
            "a run compiles late (`jit_verify` names them)."
        )


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
