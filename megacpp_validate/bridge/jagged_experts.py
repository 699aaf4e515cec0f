"""Gated experts on jagged rows without host synchronization: sort by expert, grouped products, weighted sum.

    order = by expert, within an expert by token (as `bridge.permute`)
    up    = rows @ up_weight[e]^T
    inner = silu(gate) x linear x weight of the assignment      one rounding
    out   = inner @ down_weight[e]^T
    token = the sum of its k rows, in fp32                      one rounding

The number of rows is tokens x k, which the host knows; where each expert's rows end stays on the device. So neither
pass waits, and a CUDA graph can contain the layer. The weight of an assignment is applied before the last product
instead of after it: the function is the same, and its gradient needs no further pass.

The backward pass uses the saved tokens, the result of the first product and 8 bytes a row; it computes rows and `inner`
again. Of torch's grouped_mm only products are used, for the reasons in `native.grouped_gemm`; a kernel sets the
gradients of experts without rows to zero.

With weights in block-scaled FP8, DeepGEMM makes both products forward and both gradients of rows: rows are padded by
expert to whole tiles, still without the host, and are rounded by the kernels that make them. The gradients of the
weights stay in bf16: the k-grouped FP8 kernel takes the numbers of rows from the host, adds in fp32, and is not in
sgl-deep-gemm 0.1.3 (DeepGEMM 891d57b, csrc/apis/gemm.hpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..native.grouped_gemm import ends_of, grouped_gemm_loop, grouped_mm_refusal, grouped_product, packed
from ..native.norms import without_autocast
from .backends import Refusal
from .deep_gemm import TILE, QuantizedWeight, RowCast, multiply_padded, why_not_deep_gemm
from .errors import WrongDtype, WrongShape
from .vendor import TRITON

SORT_BLOCK: Final = 128  # assignments that one program of the counting sort places
SORT_EXPERTS: Final = 256  # a program's table of assignments x experts must fit into registers
SORT_BLOCKS: Final = 4096  # each program reads the counts of all blocks
ZERO_PROGRAMS: Final = 64  # of one expert

Fp8Weights = tuple[QuantizedWeight, QuantizedWeight]  # up and down


@dataclass(frozen=True, eq=False)
class Order:
    """The rows of the assignments of tokens to experts.

    Attributes:
        order: int32 [P], the assignment (token x k + slot) of each row, -1 for padding; P = T x k without any.
        place: int32 [T, k], the row of each assignment; None where rows are given by expert.
        ends: int32 [E], where the rows of each expert end, its padding included.
        groups: int32 [P], the expert of each row, -1 for padding.
    """

    order: Any
    place: Any
    ends: Any
    groups: Any = None


class Rows(NamedTuple):
    """Rows [P, D] in the dtype of the tokens, in E4M3 for a product in FP8, or both; None where not asked for."""

    plain: Any
    cast: RowCast | None = None


def jagged_moe(
    tokens: Any, chosen: Any, weights: Any, up_weight: Any, down_weight: Any, *, fp8: Fp8Weights | None = None
) -> Any:
    """Each token through its k experts, summed with their weights.

    Args:
        tokens: [T, D].
        chosen: int64 [T, k], the experts of each token, each at most once. Values on a GPU are not checked: a number
            outside of 0 to E - 1 gives wrong results.
        weights: fp32 (fp64 beside tokens in fp64) [T, k].
        up_weight: [E, 2F, D] in the dtype of the tokens, the gate first.
        down_weight: [E, D, F], likewise.
        fp8: both as `deep_gemm.cast_weight` rounds them, where `why_not_fp8` gives no reason against it.

    Returns:
        [T, D] in the dtype of the tokens, also inside an autocast region. Gradients reach tokens, weights and both
        weights of the experts; an expert without tokens gets zeros.

    Raises:
        WrongShape, WrongDtype: tensors that do not belong together.
    """
    _check(tokens, chosen, weights, up_weight, down_weight)
    with without_autocast(tokens):
        if why_not_fused(tokens, up_weight, down_weight):
            return _plain(tokens, chosen, weights, up_weight, down_weight)
        order = sort_by_expert(chosen, up_weight.shape[0], align=1 if fp8 is None else TILE)
        return _JaggedMoe.apply(tokens.contiguous(), order, weights.contiguous(), up_weight, down_weight, fp8)


def jagged_rows(rows: Any, rows_per_expert: Sequence[int], up_weight: Any, down_weight: Any) -> Any:
    """Rows that are sorted by expert already through their experts, without weights: [R, D] -> [R, D].

    Args:
        rows: [R, D]; R may be 0.
        rows_per_expert: E numbers on the host that sum to R. The host does not wait for the device.
        up_weight, down_weight: as in `jagged_moe`.

    Returns:
        [R, D] in the dtype of the rows, also inside an autocast region; gradients as in `jagged_moe`.
    """
    with without_autocast(rows):
        if why_not_fused(rows, up_weight, down_weight):
            return _plain_rows(rows, rows_per_expert, up_weight, down_weight)
        own = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
        order, ones = Order(own, None, ends_of(rows_per_expert, rows.device)), torch.ones_like(own, dtype=torch.float32)
        return _JaggedMoe.apply(packed(rows), order, ones, up_weight, down_weight, None)


def why_not_fused(tokens: Any, up_weight: Any, down_weight: Any) -> str:
    """Why the fused path cannot be used; empty where it can.

    The other path, a loop over the experts, computes the same, and on a GPU waits for the numbers of rows.
    """
    if _kernels() is None:
        return "Triton is not available"
    return grouped_mm_refusal(tokens, up_weight) or grouped_mm_refusal(tokens, down_weight)


def why_not_fp8(tokens: Any, top_k: int, up_weight: Any, down_weight: Any) -> Refusal | None:
    """Why DeepGEMM cannot take the products of a pass; None where it can.

    Args:
        tokens, up_weight, down_weight: as in `jagged_moe`.
        top_k: k.
    """
    experts, hidden, width = down_weight.shape
    refused = why_not_deep_gemm(tokens.device, tokens.dtype, hidden, 2 * width)
    refused = refused or why_not_deep_gemm(tokens.device, tokens.dtype, width, hidden)
    rows = tokens.shape[0] * top_k
    if refused is None:
        hopper = torch.cuda.get_device_capability(tokens.device)[0] == 9  # later cards take powers of two as scales
        fused = not why_not_fused(tokens, up_weight, down_weight) and _sorts_by_counting(tokens, rows, experts)
        if not hopper or not fused:
            most = f"{SORT_EXPERTS} experts and {SORT_BLOCKS * SORT_BLOCK} rows"
            refused = Refusal("deep_gemm", "not-fused", f"only the fused path pads: on Hopper, up to {most}")
    return refused


def _sorts_by_counting(chosen: Any, assignments: int, experts: int) -> bool:
    """Whether the counting sort, which alone can pad, takes so many assignments on the device of a tensor."""
    small = 0 < assignments <= SORT_BLOCKS * SORT_BLOCK and experts <= SORT_EXPERTS
    return chosen.device.type == "cuda" and small and _kernels() is not None


def sort_by_expert(chosen: Any, num_experts: int, *, align: int = 1) -> Order:
    """The order of the rows, by expert and then by token, without host synchronization.

    Args:
        chosen: int64 [T, k].
        num_experts: E.
        align: the multiple to which the rows of each expert are padded; above 1 on the fused path alone.
    """
    flat = chosen.reshape(-1)
    total = flat.shape[0]
    if _sorts_by_counting(chosen, total, num_experts):
        return _counting_sort(flat, chosen.shape, num_experts, align)
    sorted_experts, order = flat.sort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(total, device=flat.device))
    numbers = torch.arange(num_experts, device=flat.device)
    ends = torch.searchsorted(sorted_experts, numbers, right=True)
    return Order(order.int(), place.int().reshape(chosen.shape), ends.int())


def _counting_sort(flat: Any, shape: Any, num_experts: int, align: int) -> Order:
    kernels = _kernels.require()
    total, wide = flat.shape[0], _power_of_two(num_experts)
    blocks = -(-total // SORT_BLOCK)
    counts, place, ends = (
        torch.empty(size, dtype=torch.int32, device=flat.device) for size in (blocks * wide, total, num_experts)
    )
    # As many rows as there can be: the host does not know how much of it is padding.
    height = (total + num_experts * (align - 1)) // align * align
    order, groups = torch.full((2, height), -1, dtype=torch.int32, device=flat.device)
    flat = flat.contiguous()
    kernels.count_kernel[(blocks,)](flat, counts, total, wide=wide, block=SORT_BLOCK)
    kernels.place_kernel[(blocks,)](
        flat, counts, order, groups, place, ends, total, blocks, num_experts,
        wide=wide, block=SORT_BLOCK, chunk=32, align=align,
    )  # fmt: skip
    return Order(order, place.reshape(shape), ends, groups)


def gather_rows(tokens: Any, order: Order, *, plain: bool = True, cast: bool = False) -> Rows:
    """Tokens [T, D] as rows [P, D]; zeros for padding. Rows that are given by expert are taken as they are."""
    if order.place is None:
        return Rows(tokens)
    height, width = order.order.shape[0], tokens.shape[1]
    rows = tokens.new_empty(height, width) if plain else None
    low = _new_cast(order, width) if cast else None
    _kernels.require().gather_kernel[(height,)](
        tokens, order.order, tokens if rows is None else rows, *(low or (tokens, tokens))[:2], width, height,
        top_k=order.place.shape[1], plain=plain, cast=cast, block=_block(width),
    )  # fmt: skip
    return Rows(rows, low)


def _new_cast(order: Order, width: int) -> RowCast:
    """Rows in E4M3 that a kernel is to write."""
    height, device = order.order.shape[0], order.order.device
    values = torch.empty(height, width, dtype=torch.float8_e4m3fn, device=device)
    return RowCast(values, torch.empty(width // TILE, height, device=device).t(), order.groups)


def combine_rows(rows: Any, order: Order) -> Any:
    """The sum of each token's rows, [R, D] -> [T, D]; rows that were given by expert stay as they are."""
    if order.place is None:
        return rows
    tokens, top_k = order.place.shape
    width, out = rows.shape[1], rows.new_empty(tokens, rows.shape[1])
    _kernels.require().combine_kernel[(tokens,)](rows, order.place, out, width, top_k=top_k, block=_block(width))
    return out


def gate_rows(up: Any, weights: Any, order: Order, *, cast: bool = False) -> Rows:
    """silu(gate) x linear x weight of each row, [P, 2F] -> [P, F], plain or in E4M3; weights fp32 [T, k]."""
    height, width = up.shape[0], up.shape[1] // 2
    inner = None if cast else up.new_empty(height, width)
    low = _new_cast(order, width) if cast else None
    _kernels.require().gate_kernel[(height,)](
        up, order.order, weights, up if inner is None else inner, *(low or (up, up))[:2], width, height,
        cast=cast, block=_block(width, 512), num_warps=2,
    )  # fmt: skip
    return Rows(inner, low)


def gate_rows_backward(
    up: Any, of_inner: Any, weights: Any, order: Order, *, cast: bool = False
) -> tuple[Rows, Any, Any]:
    """Gradients of `up` [P, 2F], with `cast` in E4M3 too, and of the weights [T, k]; `inner` [P, F] once more."""
    height, width = of_inner.shape
    of_up, inner, of_weights = torch.empty_like(up), torch.empty_like(of_inner), torch.empty_like(weights)
    low = _new_cast(order, 2 * width) if cast else None
    _kernels.require().gate_backward_kernel[(height,)](
        up, order.order, weights, of_inner, of_up, inner, of_weights, *(low or (up, up))[:2], width, height,
        cast=cast, block=_block(width, 512), num_warps=2,
    )  # fmt: skip
    return Rows(of_up, low), of_weights, inner


def zero_idle(gradient: Any, ends: Any) -> Any:
    """`gradient` [E, ...], in place: zeros for each expert that has no rows."""
    size = gradient.numel() // gradient.shape[0]
    _kernels.require().zero_idle_kernel[(gradient.shape[0], ZERO_PROGRAMS)](gradient, ends, size, block=1024)
    return gradient


class _JaggedMoe(torch.autograd.Function):
    """The layer between the router and the residual stream."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Any, order: Order, weights: Any, up_weight: Any, down_weight: Any, fp8: Fp8Weights | None
    ) -> Any:
        up_weight, down_weight = packed(up_weight), packed(down_weight)
        cast, (low_up, low_down) = fp8 is not None, fp8 or (None, None)
        rows = gather_rows(tokens, order, plain=not cast, cast=cast)
        up = _times(rows, up_weight, low_up, order)
        inner = gate_rows(up, weights, order, cast=cast)
        mixed = combine_rows(_times(inner, down_weight, low_down, order), order)
        ctx.save_for_backward(tokens, weights, up_weight, down_weight, up)
        ctx.order, ctx.fp8 = order, fp8
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> tuple[Any, None, Any, Any, Any, None]:
        tokens, weights, up_weight, down_weight, up = ctx.saved_tensors
        cast, (low_up, low_down), order = ctx.fp8 is not None, ctx.fp8 or (None, None), ctx.order
        of_out = gather_rows(packed(grad), order, cast=cast)
        of_inner = _times_turned(of_out, down_weight, low_down, order)
        of_up, of_weights, inner = gate_rows_backward(up, of_inner, weights, order, cast=cast)
        of_down = grouped_product(of_out.plain.t(), inner, order.ends)
        del of_out, of_inner, inner
        of_rows = _times_turned(of_up, up_weight, low_up, order)
        of_tokens = combine_rows(of_rows, order)
        del of_rows
        rows = gather_rows(tokens, order)
        of_up_weight = grouped_product(of_up.plain.t(), rows.plain, order.ends)
        zero_idle(of_down, order.ends)
        zero_idle(of_up_weight, order.ends)
        return of_tokens, None, of_weights, of_up_weight, of_down, None


def _times(rows: Rows, weight: Any, low: QuantizedWeight | None, order: Order) -> Any:
    """Rows [P, K] times weights [E, N, K]^T -> [P, N]."""
    if low is not None and rows.cast is not None:
        return multiply_padded(rows.cast, low.values, low.scales)
    return grouped_product(rows.plain, weight.transpose(1, 2), order.ends)


def _times_turned(rows: Rows, weight: Any, low: QuantizedWeight | None, order: Order) -> Any:
    """Rows [P, N] times weights [E, N, K] -> [P, K]."""
    if low is not None and rows.cast is not None:
        return multiply_padded(rows.cast, low.turned, low.turned_scales)
    return grouped_product(rows.plain, weight, order.ends)


def _plain_rows(rows: Any, counts: Sequence[int], up_weight: Any, down_weight: Any, scale: Any = None) -> Any:
    """`jagged_rows` in plain torch, by a loop over the experts; `scale` [R, 1] of each row, if any."""
    gate, linear = grouped_gemm_loop(rows, up_weight, counts).to(_wide(rows)).chunk(2, dim=-1)
    inner = functional.silu(gate) * linear
    inner = inner if scale is None else inner * scale
    return grouped_gemm_loop(inner.to(rows.dtype), down_weight, counts)


def _wide(rows: Any) -> Any:
    return torch.promote_types(rows.dtype, torch.float32)


def _plain(tokens: Any, chosen: Any, weights: Any, up_weight: Any, down_weight: Any) -> Any:
    """The same mathematics and roundings in plain torch, by a loop over the experts."""
    experts, (count, top_k) = up_weight.shape[0], chosen.shape
    order = sort_by_expert(chosen, experts)
    ends = order.ends.tolist()
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    wide = _wide(tokens)
    assignment = order.order.long()
    # In the wide dtype, so that the gradients of a token's rows are summed in it.
    rows = tokens.to(wide).index_select(0, assignment // top_k).to(tokens.dtype)
    scale = weights.to(wide).reshape(-1).index_select(0, assignment).unsqueeze(-1)
    out = _plain_rows(rows, counts, up_weight, down_weight, scale).to(wide)
    taken = out.index_select(0, order.place.reshape(-1).long())
    return taken.reshape(count, top_k, tokens.shape[1]).sum(dim=1).to(tokens.dtype)


def _check(tokens: Any, chosen: Any, weights: Any, up_weight: Any, down_weight: Any) -> None:
    count, width = tokens.shape
    experts, inner, wide = up_weight.shape[0], down_weight.shape[-1], _wide(tokens)
    given = (tokens, chosen, weights, up_weight, down_weight)
    shapes = [(count, chosen.shape[-1])] * 2 + [(experts, 2 * inner, width), (experts, width, inner)]
    dtypes = [tokens.dtype, torch.int64, wide, tokens.dtype, tokens.dtype]
    if [one.shape for one in given[1:]] != shapes or not 1 <= chosen.shape[-1] <= experts:
        raise WrongShape(
            f"tokens, chosen, weights, up_weight and down_weight are {[list(one.shape) for one in given]}. Next step: "
            "pass [T, D], [T, k], [T, k], [E, 2F, D] and [E, D, F], k from 1 to E."
        )
    if [one.dtype for one in given] != dtypes:
        raise WrongDtype(
            f"tokens, chosen, weights, up_weight and down_weight are {[one.dtype for one in given]}. Next step: pass "
            f"weights in {wide}, chosen in torch.int64, the others in one dtype."
        )


@TRITON.entry
def _kernels() -> Any:
    """The module of Triton kernels."""
    from .kernels import moe_rows

    return moe_rows


def _block(width: int, most: int = 2048) -> int:
    return min(_power_of_two(width), most)


def _power_of_two(number: int) -> int:
    return int(max(2, 1 << (number - 1).bit_length()))
