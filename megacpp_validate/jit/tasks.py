"""Tasks of a prewarm, a function a code: each compiles the kernels of one library, by the bridge's own calls.

Torch and the bridge are imported by the task that needs them.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

from .driver_cache import name_driver_kernels
from .monitor import unwatched
from .order import JitOrder, Lacking
from .tasks_triton import compile_triton

_ROOM = (__package__ or "megacpp_validate.jit").rpartition(".")[0]


def compile_nothing(order: JitOrder) -> None:
    """Compile nothing: every answer describes the stack that is installed here."""


def compile_inductor_cpu(order: JitOrder) -> None:
    """Two small programs of TorchInductor as C++, forward and backward: every machine can compile them.

    Settings: `program` ("norm" or "gated"), `rows` and `width` of its input, fp32.
    """
    import torch

    torch.manual_seed(order.seed)
    rows, width = int(order.setting("rows", "64")), int(order.setting("width", "32"))
    name = order.setting("program", "norm")
    if name not in PROGRAMS:
        raise ValueError(f"there is no program {name!r}. Next step: choose one of {', '.join(PROGRAMS)}.")
    compiled = torch.compile(PROGRAMS[name], dynamic=False)
    x = torch.randn(rows, width, requires_grad=True)
    compiled(x).backward()


def _norm(x: Any) -> Any:
    """RMSNorm, summed: [R, D] -> []."""
    return (x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()).sum()


def _gated(x: Any) -> Any:
    """silu(gate) x linear, averaged: [R, 2F] -> []."""
    gate, linear = x.chunk(2, dim=-1)
    return (gate * gate.sigmoid() * linear).mean()


PROGRAMS: Final[dict[str, Callable[[Any], Any]]] = {"norm": _norm, "gated": _gated}


# --- FlashAttention 4 -------------------------------------------------------------------------------------------------

# Multiprocessors of the device: FlashAttention plans its launches by them, and there is no device to query here.
_MULTIPROCESSORS: Final = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148, "sm_120a": 188, "sm_121a": 48}
_INTERFACE: Final = "flash_attn.cute.interface"


def compile_fa4(order: JitOrder) -> None:
    """FlashAttention 4 for a named architecture; no GPU is needed.

    Its own functions run on tensors without memory (torch's FakeTensorMode), for which they compile and do not launch.
    The name of `bwd_pre` does not hold the architecture (4.0.0b36), so each has a folder of its own in the cache.

    Settings: `direction` ("forward backward"), `dtype`, `head_dim`, `heads`, `groups`, `causal`, `softcap`.

    `tokens`, 512 without it, is in no key.

    Raises:
        Lacking: FlashAttention 4 is not installed.
        ValueError: an architecture that has no such kernels, or a library that was loaded for another.
    """
    name_architecture(order.arch)
    try:
        interface = importlib.import_module(_INTERFACE)
    except ImportError as fault:
        raise Lacking(f"FlashAttention 4 cannot be imported: {fault}") from fault
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    given: dict[str, Any] = {"causal": order.setting("causal", "true") == "true"}
    if softcap := float(order.setting("softcap", "0") or 0):
        given["softcap"] = softcap
    dtype = getattr(torch, order.setting("dtype", "bfloat16"))
    tokens, width = int(order.setting("tokens", "512")), int(order.setting("head_dim", "64"))
    heads, groups = int(order.setting("heads", "8")), int(order.setting("groups", order.setting("heads", "8")))
    directions = order.words("direction", "forward backward")
    with FakeTensorMode():
        query, key, value, out = (
            torch.empty(1, tokens, number, width, dtype=dtype, device="cuda")
            for number in (heads, groups, groups, heads)
        )
        lse = torch.empty(1, heads, tokens, dtype=torch.float32, device="cuda")
        if "forward" in directions:
            interface._flash_attn_fwd(query, key, value, return_lse=False, **given)
            interface._flash_attn_fwd(query, key, value, return_lse=True, **given)
        if "backward" in directions:
            interface._flash_attn_bwd(query, key, value, out, out, lse, **given)


def name_architecture(arch: str) -> None:
    """Set the architecture that both libraries compile for, before they are loaded.

    Raises:
        ValueError: they have no such architecture, or are loaded already.
    """
    if arch not in _MULTIPROCESSORS:
        raise ValueError(f"FlashAttention 4 has no {arch!r}. Next step: name one of {', '.join(_MULTIPROCESSORS)}.")
    if _INTERFACE in sys.modules:
        raise ValueError(f"{_INTERFACE} is loaded already. Next step: run the task in a process of its own.")
    os.environ["CUTE_DSL_ARCH"] = arch
    os.environ["FLASH_ATTENTION_ARCH"] = re.sub(r"[af]$", "", arch)
    os.environ["FLASH_ATTENTION_NUM_SMS"] = str(_MULTIPROCESSORS[arch])


# --- DeepGEMM ---------------------------------------------------------------------------------------------------------


def compile_deep_gemm(order: JitOrder) -> None:
    """DeepGEMM's kernels for an expert bank of the smoke run, forward and both gradients; needs a GPU.

    Settings: `size` of `training.sizes` (its experts, widths and tokens), or `experts`, `inputs`, `outputs`, `rows`.

    `shift`: how many rows the first expert has fewer, and the last more, where experts are not alike; half without it.

    Raises:
        Lacking: no GPU that DeepGEMM has kernels for, or no DeepGEMM.
    """
    import torch

    torch.manual_seed(order.seed)
    for experts, inputs, outputs, rows in banks(order):
        weight = torch.randn(experts, outputs, inputs, device=device(torch), dtype=torch.bfloat16, requires_grad=True)
        tokens = torch.randn(rows, inputs, device=weight.device, dtype=torch.bfloat16, requires_grad=True)
        product = importlib.import_module(f"{_ROOM}.bridge.deep_gemm_product")
        refusal = product.why_not_deep_gemm(weight.device, weight.dtype, inputs, outputs)
        if refusal is not None:
            raise Lacking(f"{refusal.backend}: {refusal.reason}")
        for counts in routings(experts, rows, int(order.setting("shift", "0"))):
            out = product.deep_gemm_grouped(tokens, weight, counts)
            out.backward(torch.randn_like(out))
    torch.cuda.synchronize()


def banks(order: JitOrder) -> list[tuple[int, int, int, int]]:
    """Experts, inputs K, outputs N and rows of each product of an expert layer."""
    if size := order.setting("size"):
        of = importlib.import_module(f"{_ROOM}.training.sizes").read_size(size)
        rows = of.batch * of.length * of.top_k
        return [
            (of.num_experts, of.hidden, 2 * of.expert_width, rows),
            (of.num_experts, of.expert_width, of.hidden, rows),
        ]
    wanted = ("experts", "inputs", "outputs", "rows")
    if lacking := [name for name in wanted if not order.setting(name)]:
        raise ValueError(f"settings lack {', '.join(lacking)}. Next step: name them, or a size.")
    experts, inputs, outputs, rows = (int(order.setting(name)) for name in wanted)
    return [(experts, inputs, outputs, rows)]


def device(torch: Any) -> str:
    """The device of the tensors, "cuda". Raises `Lacking` where torch sees none."""
    if not torch.cuda.is_available():
        raise Lacking("DeepGEMM reads the architecture from the device, and torch sees no CUDA device here")
    return "cuda"


def routings(experts: int, rows: int, shift: int = 0) -> list[list[int]]:
    """Rows of each expert, equal and unequal: the weight's gradient is one launch for all, or one an expert."""
    alike = [rows // experts] * experts
    uneven, moved = [*alike], shift or alike[0] // 2
    uneven[0], uneven[-1] = alike[0] - moved, alike[-1] + moved
    return [alike, uneven]


# --- Transformer Engine: rows of experts ------------------------------------------------------------------------------
#
# Where every expert has rows, one precompiled kernel casts them all (delayed scaling). Where an expert has none, they
# are cast one by one, as current scaling always does; such a cast is chosen by its tensor's shape and compiled by NVRTC
# at its first use. So a prewarmed run may need in its hundredth step a cast that the run before never needed
# (`multi_tensor_quantize_impl` of the torch extension and `cast_transpose` of 2.20.2; seen on one H200). The shape of a
# dense layer is the preset's; that of an expert is what the router gave it. A number of rows that 32 does not divide is
# cast by a precompiled kernel.
#
# Hopper alone: where a product in FP8 takes rows as they lie (`nvte_is_non_tn_fp8_gemm_supported`: 10.x, 11.x), nothing
# is transposed, and the kernels that cast are precompiled.

_SWITCH: Final = "NVTE_DISABLE_NVRTC"  # of Transformer Engine: kernels that come compiled alone
_KERNEL: Final = "cast_transpose_optimized_kernel"
_FORMATS: Final = ("e4m3", "e5m2")  # of what goes forward, and of gradients
# Files that a sweep leaves at least for each format, two a kernel. By the rule that chooses a kernel (`KernelConfig` of
# common/transpose/cast_transpose.cu) it leaves six kernels forward and seven backward on 132 SMs, and weights one.
_FEWEST: Final = 6
_OFF: Final = ("", "0")  # as Transformer Engine reads its switch: empty is not set


def compile_expert_rows(order: JitOrder) -> None:
    """Transformer Engine's casts of an expert bank's rows, for every number of rows that a router may give an expert.

    Settings: `size`, a name of `training.sizes`; `recipes` with one scale a tensor that this machine's target has.

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
        RuntimeError: too few, or a variable switches these compiles of Transformer Engine off.
    """
    if os.environ.get(_SWITCH, "") not in _OFF:
        raise RuntimeError(f"{_SWITCH} keeps Transformer Engine from compiling these kernels. Next step: unset it.")
    seen = {name: sum(_KERNEL in kernel and name in kernel for kernel in kernels) for name in _FORMATS}
    if min(seen.values()) < _FEWEST:
        found = " and ".join(f"{seen[name]} of {name}" for name in _FORMATS)
        raise RuntimeError(
            f"the driver's cache holds {found} of the files of {_KERNEL}, and every number of rows wants {_FEWEST} or "
            "more of each. Likely cause: this release casts experts' rows by other kernels. Next step: look which ones "
            "a run compiles late (`jit_verify` names them)."
        )


def _train(bank: Any, counts: list[int], scope: AbstractContextManager[Any]) -> None:
    """Forward and backward once; the gradients are freed."""
    import torch

    rows = torch.randn(sum(counts), bank.in_features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with scope as entered:
        out = bank(rows, counts)
    if entered.choice.observed != "te" or bank.choice.observed != "te":
        refused = "; ".join(one.reason for one in (*entered.choice.refusals, *bank.choice.refusals))
        raise Lacking(f"Transformer Engine does not take these calls: {refused or 'another backend did'}")
    out.backward(torch.randn_like(out))
    bank.zero_grad(set_to_none=True)


TASKS: Final[dict[str, Callable[[JitOrder], None]]] = {
    "stack": compile_nothing,
    "inductor_cpu": compile_inductor_cpu,
    "fa4": compile_fa4,
    "triton": compile_triton,
    "deep_gemm": compile_deep_gemm,
    "expert_rows": compile_expert_rows,
}
