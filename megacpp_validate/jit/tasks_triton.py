"""The bridge's own Triton kernels, compiled by explicit target at image build: no GPU is wanted.

The functions that launch them are called on tensors without memory (`explicit_target`). Transformer Engine's
permutation is not here: its kernels choose among configurations by timing them, which takes a device.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, Final

from .explicit_target import Pointer, compiling_for
from .order import JitOrder

_BRIDGE: Final = f"{(__package__ or 'megacpp_validate.jit').rpartition('.')[0]}.bridge"
_SIZES: Final = f"{(__package__ or 'megacpp_validate.jit').rpartition('.')[0]}.training.sizes"


def compile_task(order: JitOrder) -> None:
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
    """The jagged way to the experts, forward and backward: all of its stages but torch's grouped products."""
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
    """Weights of all experts; indexing a tensor asks for its device, which need not be there."""

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
