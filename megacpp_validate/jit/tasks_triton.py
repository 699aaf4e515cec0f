"""The bridge's own Triton kernels, compiled for a named architecture when an image is built: no GPU is needed.

The functions that launch the kernels run as they are, on tensors that have shapes and no memory: types, constants,
warps and the alignment of every argument are those of the real launch, and with them Triton's key. The device that
Triton asks knows its architecture and nothing else. Transformer Engine's permutation is not among the kernels: they
choose their configurations by timing them, which takes a device.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from .order import JitOrder, Lacking

_BRIDGE: Final = f"{(__package__ or 'megacpp_validate.jit').rpartition('.')[0]}.bridge"
_SIZES: Final = f"{(__package__ or 'megacpp_validate.jit').rpartition('.')[0]}.training.sizes"
_ARCH: Final = re.compile(r"sm_(\d+)[af]?")
_WARP: Final = 32
FAR_ALIGNED: Final = 512  # bytes; no block of torch's allocator is smaller (c10/cuda/CUDACachingAllocator.cpp)


class _Device:
    """The part of Triton's driver interface that a launch reads."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

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


@contextmanager
def compiling_for(arch: str) -> Iterator[None]:
    """While this is open, launching a Triton kernel compiles it for `arch`, and does no more.

    Args:
        arch: such as "sm_90a".

    Raises:
        Lacking: there is no Triton.
        ValueError: no architecture.
    """
    found = _ARCH.fullmatch(arch)
    if found is None:
        raise ValueError(f"{arch!r} is no architecture of CUDA. Next step: name one such as sm_90a.")
    try:
        import torch
        from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found, unused-ignore]
        from triton.runtime.driver import driver  # type: ignore[import-not-found, unused-ignore]
        from triton.runtime.jit import JITFunction  # type: ignore[import-not-found, unused-ignore]
    except ImportError as fault:
        raise Lacking(f"there is no Triton: {fault}") from fault
    plain = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, **options: Any) -> Any:
        options.pop("warmup", None)
        given = [Pointer(one) if isinstance(one, torch.Tensor) else one for one in args]
        named = {name: Pointer(one) if isinstance(one, torch.Tensor) else one for name, one in options.items()}
        return plain(self, *given, grid=grid, warmup=True, **named)

    before = driver._active  # None before the first launch: asking for it by name would look for a GPU
    driver.set_active(_Device(GPUTarget("cuda", int(found[1]), _WARP)))
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = plain
        driver._active = before


def compile_triton(order: JitOrder) -> None:
    """Settings: `kernels`, any of PROGRAMS; `sizes`, names of `training.sizes`.

    Raises:
        Lacking: there is no Triton.
    """
    wanted, sizes = order.words("kernels", " ".join(PROGRAMS)), order.words("sizes", "small")
    if unknown := sorted(set(wanted) - set(PROGRAMS)):
        raise ValueError(f"there are no kernels {', '.join(unknown)}. Next step: choose of {', '.join(PROGRAMS)}.")
    with compiling_for(order.arch):
        from torch._subclasses.fake_tensor import FakeTensorMode

        for size in sizes:
            of = importlib.import_module(_SIZES).read_size(size)
            for name in wanted:
                bridge = importlib.import_module(f"{_BRIDGE}.{_MODULES[name]}")
                prepared = _PREPARED[name](of) if name in _PREPARED else None
                with FakeTensorMode(allow_non_fake_inputs=True):
                    PROGRAMS[name](bridge, of, prepared)


def _residual_norm(bridge: Any, size: Any, _: Any) -> None:
    """The residual stream [B, T, D] in bf16, forward and backward."""
    import torch

    rows = _new(size.batch, size.length, size.hidden)
    for weight in (_new(size.hidden), _new(size.hidden, dtype=torch.float32)):
        bridge.launch(rows, rows, weight, size.eps)
        bridge.launch_backward(rows, weight, rows, rows, size.eps)


def _rotation(bridge: Any, size: Any, _: Any) -> None:
    """Query and key as slices of one projection [B, T, (H + 2G) D], and gradients, which lie alone."""
    import torch

    heads, groups, width = size.num_heads, size.num_gqa_groups, size.head_dim
    cos = sin = _new(size.length, width // 2, dtype=torch.float32)
    joined = _new(size.batch, size.length, (heads + 2 * groups) * width).view(size.batch, size.length, -1, width)
    for rows in (joined.narrow(2, 0, heads), joined.narrow(2, heads, groups)):
        alone = _new(*rows.shape)
        for given, sign in ((rows, 1.0), (alone, 1.0), (alone, -1.0)):
            bridge.launch(given, cos, sin, alone, sign)


def _moe_rows(bridge: Any, size: Any, _: Any) -> None:
    """Jagged dispatch to the experts, forward and backward: every stage but torch's grouped products."""
    import torch

    tokens, top_k = size.batch * size.length, size.top_k
    chosen, weights = _new(tokens, top_k, dtype=torch.int64), _new(tokens, top_k, dtype=torch.float32)
    stream, up = _new(tokens, size.hidden), _new(tokens * top_k, 2 * size.expert_width)
    order = bridge.sort_by_expert(chosen, size.num_experts)
    rows = bridge.gather_rows(stream, order)
    bridge.combine_rows(rows, order)
    bridge.combine_rows(rows, order, weights)
    bridge.combine_rows_backward(stream, order, weights, rows)
    inner = bridge.gate_rows(up, weights, order)
    bridge.gate_rows(up)
    bridge.gate_rows_backward(up, inner, weights, order)
    bridge.gate_rows_backward(up, inner)
    for shape in ((2 * size.expert_width, size.hidden), (size.hidden, size.expert_width)):
        bridge.zero_idle(_Bank(_new(size.num_experts, *shape)), order.ends)


class _Bank(Pointer):
    """Weights of all experts; indexing a real tensor would need its device, which may be absent."""

    def __getitem__(self, expert: int) -> Any:
        return _Numbers(math.prod(self.shape[1:]))


class _Numbers:
    def __init__(self, many: int) -> None:
        self._many = many

    def numel(self) -> int:
        """Of one expert."""
        return self._many


def _plan_tiles(size: Any) -> list[Any]:
    """Tables of tiles, made before tensors lose their memory: experts alike, and not (numbers aligned otherwise)."""
    bridge = importlib.import_module(f"{_BRIDGE}.deep_gemm_cast")
    each = size.batch * size.length * size.top_k // size.num_experts
    routings = ([each] * size.num_experts, [each + 1, *[each] * (size.num_experts - 2), each - 1])
    return [bridge.plan_tiles(counts, "cpu") for counts in routings]


def _block_casts(bridge: Any, size: Any, plans: Any) -> None:
    """Casts of an expert bank: rows and gradients, weights of both products, and rows of a fixed capacity."""
    import torch

    widths = {size.hidden, 2 * size.expert_width, size.expert_width}
    for plan in plans:
        tiles = type(plan)(plan.counts, plan.padded, _new(*plan.table.shape, dtype=torch.int32))
        for width in sorted(widths):
            rows = _new(sum(plan.counts), width)
            for with_rows, columns in ((True, "none"), (True, "blocks"), (True, "vectors"), (False, "vectors")):
                bridge.cast_tokens(rows, tiles, rows=with_rows, columns=columns)
    for shape in ((2 * size.expert_width, size.hidden), (size.hidden, size.expert_width)):
        weight = _new(size.num_experts, *shape)
        bridge.cast_weight(weight, turn=False)
        bridge.cast_weight(weight)
        bridge.renew_weight(bridge.cast_weight(weight, keep=True), weight)
    capacity = plans[0].counts[0]
    bridge.cast_masked(_new(size.num_experts, capacity, size.hidden), _new(size.num_experts, dtype=torch.int32))


def _new(*shape: int, dtype: Any = None) -> Any:
    """A tensor on a GPU that need not be there; bf16 without a dtype."""
    import torch

    return torch.empty(shape, dtype=dtype or torch.bfloat16, device="cuda")


_MODULES: Final = {
    "residual_norm": "residual_norm",
    "rotation": "rotation",
    "moe_rows": "jagged_experts",
    "block_casts": "deep_gemm_cast",
}
_PREPARED: Final[dict[str, Callable[[Any], Any]]] = {"block_casts": _plan_tiles}
PROGRAMS: Final[dict[str, Callable[[Any, Any, Any], None]]] = {
    "residual_norm": _residual_norm,
    "rotation": _rotation,
    "moe_rows": _moe_rows,
    "block_casts": _block_casts,
}
