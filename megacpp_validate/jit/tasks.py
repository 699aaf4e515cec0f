"""Tasks of a prewarm, a function a code: each compiles the kernels of one library, by the bridge's own calls.

Torch and the bridge are imported by the task that needs them.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_TE: Final = "transformer_engine"


class Lacking(Exception):
    """A task cannot run here, because something that it needs is missing: no error of the task."""


@dataclass(frozen=True)
class JitOrder:
    """A task.

    Attributes:
        task: its id, in the answer again.
        code: one of TASKS.
        arch: that they are compiled for: "sm_90a"; "cpu".
        settings: as the code takes them.
    """

    task: str
    code: str
    arch: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)


def _import(name: str) -> Any:
    """A module of another room, or of Transformer Engine's kernels, when a task needs it."""
    if name.startswith(_TE):
        if _TE not in sys.modules:
            _skip_te_libraries(name)
        return importlib.import_module(name)
    return importlib.import_module(f"..{name}", __package__)


def compile_nothing(order: JitOrder) -> None:
    """Compile nothing: every answer describes the stack that is installed here."""


def compile_inductor_cpu(order: JitOrder) -> None:
    """RMSNorm by TorchInductor as C++, forward and backward: every machine can compile it.

    Settings: `rows` and `width` of its input, fp32.
    """
    import torch

    x = torch.randn(int(order.settings["rows"]), int(order.settings["width"]), requires_grad=True)
    torch.compile(_norm, dynamic=False)(x).backward()


def _norm(x: Any) -> Any:
    """RMSNorm, summed: [R, D] -> []."""
    return (x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()).sum()


# --- FlashAttention 4 -------------------------------------------------------------------------------------------------

# Multiprocessors of the device: FlashAttention plans its launches by them, and there is no device to query here.
_MULTIPROCESSORS: Final = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148, "sm_120a": 188, "sm_121a": 48}
_INTERFACE: Final = "flash_attn.cute.interface"
TOKENS: Final = 512  # in no key


def compile_fa4(order: JitOrder) -> None:
    """FlashAttention 4 for a named architecture; no GPU is needed.

    Its own functions run on tensors without memory (torch's FakeTensorMode), for which they compile and do not launch.
    The name of `bwd_pre` does not hold the architecture (4.0.0b36), so each has a folder of its own in the cache.

    Settings: `head_dim`, `heads`, `groups`, and `softcap` where there is one. All is causal and in bf16, forward and
    backward.

    Raises:
        Lacking: FlashAttention 4 is not installed.
        KeyError: an architecture that has no such kernels.
    """
    # Both libraries read the architecture that they compile for when they are loaded.
    os.environ["CUTE_DSL_ARCH"] = order.arch
    os.environ["FLASH_ATTENTION_ARCH"] = re.sub(r"[af]$", "", order.arch)
    os.environ["FLASH_ATTENTION_NUM_SMS"] = str(_MULTIPROCESSORS[order.arch])
    try:
        interface = importlib.import_module(_INTERFACE)
    except ImportError as fault:
        raise Lacking(f"FlashAttention 4 cannot be imported: {fault}") from fault
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    given: dict[str, Any] = {"causal": True}
    if "softcap" in order.settings:
        given["softcap"] = float(order.settings["softcap"])
    heads, groups, width = (int(order.settings[name]) for name in ("heads", "groups", "head_dim"))
    with FakeTensorMode():
        query, key, value, out = (_new(1, TOKENS, number, width) for number in (heads, groups, groups, heads))
        lse = _new(1, heads, TOKENS, dtype=torch.float32)
        interface._flash_attn_fwd(query, key, value, return_lse=False, **given)
        interface._flash_attn_fwd(query, key, value, return_lse=True, **given)
        interface._flash_attn_bwd(query, key, value, out, out, lse, **given)


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


def compile_expert_rows(order: JitOrder) -> None:
    """Transformer Engine's casts of an expert bank's rows, for every number of rows that a router may give an expert.

    Settings: `size`, a name of `training.sizes`; `recipes` with one scale a tensor that this machine's target has.

    Raises:
        Lacking: no GPU, or Transformer Engine does not take the calls.
    """
    import torch

    if not torch.cuda.is_available():
        raise Lacking(
            "Transformer Engine compiles these kernels where it launches them: torch sees no CUDA device here"
        )
    scopes, gemms = _import("bridge.fp8_scope"), _import("bridge.expert_gemm")
    of = _import("training.sizes").read_size(order.settings["size"])
    target, experts = scopes.detect_target(), of.num_experts
    for recipe in order.settings["recipes"].split():
        for inputs, outputs in ((of.hidden, 2 * of.expert_width), (of.expert_width, of.hidden)):
            bank = gemms.ExpertGemm(
                num_experts=experts, in_features=inputs, out_features=outputs, dtype=torch.bfloat16, device="cuda"
            )
            for counts in row_counts(of.batch * of.length, experts, gemms.FP8_ROWS_ELSE):
                _train(bank, counts, scopes.low_precision(target=target, amax_reduction_group=None, recipe=recipe))
    torch.cuda.synchronize()


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


# --- Triton ----------------------------------------------------------------------------------------------------------
#
# The bridge's own Triton kernels, compiled for a named architecture when an image is built: no GPU is needed.
#
# The functions that launch the kernels run as they are, on tensors that have shapes and no memory: types, constants,
# warps and the alignment of every argument are those of the real launch, and with them Triton's key. The device that
# Triton asks knows its architecture and nothing else. A kernel that chooses its configuration by timing, as those of
# Transformer Engine's permutation do, is compiled in every configuration.

_WARP: Final = 32
_LONGEST: Final = 400  # characters of a compiler's words
_COMPILERS_LINES: Final = re.compile(r"(?:error|fatal) {2,}: .*")  # of ptxas
FAR_ALIGNED: Final = 512  # bytes; no block of torch's allocator is smaller (c10/cuda/CUDACachingAllocator.cpp)


class _Device:
    """The part of Triton's driver interface that a launch reads."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)  # Triton keeps what it compiled by device: another architecture is another one

    def get_current_stream(self, device: int) -> int:
        return device


class Pointer:
    """A tensor as Triton sees it: its dtype, and where it begins."""

    def __init__(self, tensor: Any) -> None:
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        empty = not tensor.numel()  # torch gives those the address 0
        self._address = 0 if empty else FAR_ALIGNED + tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        """Where the allocator would have put it, as far as alignment goes."""
        return self._address


class DoesNotCompile(Exception):
    """Kernels that do not compile for an architecture, each with the compiler's line."""


@contextmanager
def compiling_for(arch: str) -> Iterator[None]:
    """While this is open, launching a Triton kernel compiles it to a cubin for `arch`, and does no more.

    Args:
        arch: such as "sm_90a".

    Raises:
        Lacking: there is no Triton.
        DoesNotCompile: at the end, with every kernel that does not compile.
    """
    capability = int(re.sub(r"\D", "", arch))
    try:
        import torch
        from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found, unused-ignore]
        from triton.runtime.autotuner import Autotuner  # type: ignore[import-not-found, unused-ignore]
        from triton.runtime.driver import driver  # type: ignore[import-not-found, unused-ignore]
        from triton.runtime.jit import JITFunction  # type: ignore[import-not-found, unused-ignore]
    except ImportError as fault:
        raise Lacking(f"there is no Triton: {fault}") from fault
    plain, plain_tuned, failed = JITFunction.run, Autotuner.run, dict[str, str]()

    def run(self: Any, *args: Any, grid: Any, **options: Any) -> Any:
        options.pop("warmup", None)
        given = [Pointer(one) if isinstance(one, torch.Tensor) else one for one in args]
        named = {name: Pointer(one) if isinstance(one, torch.Tensor) else one for name, one in options.items()}
        try:
            return plain(self, *given, grid=grid, warmup=True, **named)
        except Exception as fault:  # the next kernel may compile
            whole = f"{type(fault).__name__}: {' '.join(str(fault).split())}"[:_LONGEST]
            failed[self.__name__] = next(iter(_COMPILERS_LINES.findall(str(fault))), whole)
        return None

    def run_tuned(self: Any, *args: Any, **options: Any) -> None:
        for config in self.configs:
            self.fn.run(*args, **options, **config.all_kwargs())

    before = driver._active  # None before the first launch: asking for it by name would look for a GPU
    driver.set_active(_Device(GPUTarget("cuda", capability, _WARP)))
    JITFunction.run, Autotuner.run = run, run_tuned
    try:
        yield
    finally:
        JITFunction.run, Autotuner.run = plain, plain_tuned
        driver._active = before
    if failed:
        raise DoesNotCompile("; ".join(f"{name} for {arch}: {line}" for name, line in failed.items()))


def compile_triton(order: JitOrder) -> None:
    """Settings: `kernels`, any of KERNELS; `sizes`, names of `training.sizes`.

    Raises:
        Lacking: there is no Triton, or no Transformer Engine whose kernels are asked for.
        DoesNotCompile: a kernel does not compile for the architecture.
    """
    with compiling_for(order.arch):
        from torch._subclasses.fake_tensor import FakeTensorMode

        for size in order.settings["sizes"].split():
            of = _import("training.sizes").read_size(size)
            for name in order.settings["kernels"].split():
                module, launch = KERNELS[name]
                launcher = _import(module)
                with FakeTensorMode(allow_non_fake_inputs=True):
                    launch(launcher, of)


def _residual_norm(bridge: Any, size: Any) -> None:
    """The residual stream [B, T, D] in bf16, forward and backward."""
    import torch

    rows = _new(size.batch, size.length, size.hidden)
    for weight in (_new(size.hidden), _new(size.hidden, dtype=torch.float32)):
        bridge.launch_norm(rows, rows, weight, size.eps)
        bridge.launch_norm_backward(rows, weight, rows, rows, size.eps)


def _rotation(bridge: Any, size: Any) -> None:
    """Query and key as slices of one projection [B, T, (H + 2G) D], and gradients, which lie alone."""
    import torch

    heads, groups, width = size.num_heads, size.num_gqa_groups, size.head_dim
    cos = sin = _new(size.length, width // 2, dtype=torch.float32)
    joined = _new(size.batch, size.length, (heads + 2 * groups) * width).view(size.batch, size.length, -1, width)
    for rows in (joined.narrow(2, 0, heads), joined.narrow(2, heads, groups)):
        alone = _new(*rows.shape)
        for given, sign in ((rows, 1.0), (alone, 1.0), (alone, -1.0)):
            bridge.launch_turn(given, cos, sin, alone, sign)


def _moe_rows(bridge: Any, size: Any) -> None:
    """Jagged dispatch to the experts, forward and backward: every stage but torch's grouped products."""
    import torch

    tokens, top_k = size.batch * size.length, size.top_k
    chosen, weights = _new(tokens, top_k, dtype=torch.int64), _new(tokens, top_k, dtype=torch.float32)
    stream, up = _new(tokens, size.hidden), _new(tokens * top_k, 2 * size.expert_width)
    order = bridge.sort_by_expert(chosen, size.num_experts)
    rows = bridge.gather_rows(stream, order).plain
    bridge.combine_rows(rows, order)
    inner = bridge.gate_rows(up, weights, order).plain
    bridge.gate_rows_backward(up, inner, weights, order)
    for shape in ((2 * size.expert_width, size.hidden), (size.hidden, size.expert_width)):
        bridge.zero_idle(_new(size.num_experts, *shape), order.ends)


def _block_casts(bridge: Any, size: Any) -> None:
    """Casts of an expert bank: rows and gradients, and weights of both products.

    Experts are alike, and not: then numbers of rows are aligned otherwise.
    """
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    each = size.batch * size.length * size.top_k // size.num_experts
    routings = ([each] * size.num_experts, [each + 1, *[each] * (size.num_experts - 2), each - 1])
    with unset_fake_temporarily():  # tables of tiles are made from numbers
        plans = [bridge.plan_tiles(counts, "cpu") for counts in routings]
    widths = {size.hidden, 2 * size.expert_width, size.expert_width}
    for plan in plans:
        tiles = type(plan)(plan.counts, plan.padded, _new(*plan.table.shape, dtype=torch.int32))
        for width in sorted(widths):
            rows = _new(sum(plan.counts), width)
            for with_rows, columns in ((True, "none"), (True, "blocks"), (True, "vectors"), (False, "vectors")):
                bridge.cast_tokens(rows, tiles, rows=with_rows, columns=columns, power_of_two=False)
    for shape in ((2 * size.expert_width, size.hidden), (size.hidden, size.expert_width)):
        weight = _new(size.num_experts, *shape)
        bridge.cast_weight(weight, turn=False, power_of_two=False)
        bridge.cast_weight(weight, power_of_two=False)


def _skip_te_libraries(name: str) -> None:
    """Make the packages of Transformer Engine importable without their `__init__`, which loads libraries for a GPU.

    Raises:
        Lacking: Transformer Engine's Python files are not here.
    """
    found = importlib.util.find_spec(_TE)
    if found is None or not found.submodule_search_locations:
        raise Lacking(f"there is no {_TE}. Next step: `pip install --no-deps transformer_engine`, whose files suffice")
    for package in (_TE, f"{_TE}.common", f"{_TE}.common.triton", f"{_TE}.pytorch", name.rpartition(".")[0]):
        module = sys.modules[package] = ModuleType(package)
        module.__path__ = [str(Path(found.submodule_search_locations[0], *package.split(".")[1:]))]


def _te_permute(te: Any, size: Any) -> None:
    """Transformer Engine's dispatch as the bridge calls it, forward and backward; names as its functions have them."""
    import torch

    tokens, experts, rows = size.batch * size.length, size.num_experts, size.batch * size.length * size.top_k
    of_rows = _new(rows, dtype=torch.float32)
    of_tokens = _new(tokens, experts, dtype=torch.float32)
    given: dict[str, Any] = dict.fromkeys(("scale", "pad_offsets", "scale_hidden_dim", "probs", "merging_probs"))
    given |= {"num_tokens": tokens, "num_experts": experts, "num_out_tokens": rows, "hidden_size": size.hidden}
    given |= {"routing_map": _new(tokens, experts, dtype=torch.bool), "permuted_probs": None}
    given |= {name: _new(experts, dtype=torch.int64) for name in ("split_sizes", "sorted_indices")}
    given |= {"num_splits": experts, "fwd_output_grad": _new(tokens, size.hidden), "fwd_input": _new(rows, size.hidden)}

    def launch(name: str, **more: Any) -> Any:
        function, values = getattr(te, name), {**given, **more}
        return function(**{one: values[one] for one in inspect.signature(function).parameters})

    jagged, given["row_id_map"] = given["fwd_input"], launch("make_row_id_map")
    for probs in (None, of_tokens):
        launch("permute_with_mask_map", inp=given["fwd_output_grad"], probs=probs)
        launch("unpermute_with_mask_map", inp=jagged, merging_probs=probs)
    launch("unpermute_with_mask_map", inp=jagged, permuted_probs=of_rows)
    launch("unpermute_with_mask_map_bwd_with_merging_probs", merging_probs=of_tokens)
    given |= {"num_tokens": rows, "row_id_map": launch("make_chunk_sort_map", num_tokens=rows)}
    for forward in (True, False):
        for probs in (None, of_rows):
            launch("sort_chunks_by_map", inp=jagged, probs=probs, is_forward=forward)


def _new(*shape: int, dtype: Any = None) -> Any:
    """A tensor on a GPU that need not be there; bf16 without a dtype."""
    import torch

    return torch.empty(shape, dtype=dtype or torch.bfloat16, device="cuda")


# Module that launches the kernels, and the calls.
KERNELS: Final[dict[str, tuple[str, Callable[[Any, Any], None]]]] = {
    "residual_norm": ("bridge.fused", _residual_norm),
    "rotation": ("bridge.fused", _rotation),
    "moe_rows": ("bridge.jagged_experts", _moe_rows),
    "block_casts": ("bridge.deep_gemm", _block_casts),
    "te_permute": (f"{_TE}.pytorch.triton.permutation", _te_permute),
}
TASKS: Final[dict[str, Callable[[JitOrder], None]]] = {
    "stack": compile_nothing,
    "inductor_cpu": compile_inductor_cpu,
    "fa4": compile_fa4,
    "triton": compile_triton,
    "expert_rows": compile_expert_rows,
}
