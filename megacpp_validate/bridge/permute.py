"""TE permute bridge: MoE dispatch with probabilities, padding and chunk sorting, on TE's kernels or in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch

from ..native.mlp import activation
from ..native.norms import without_autocast
from ..native.permute import (
    from_padded,
    pad_rows,
    padded_counts,
    permute,
    sort_chunks,
    to_padded,
    unpad_rows,
    unpermute,
)
from ..native.router import drop_over_capacity
from . import imports as te
from .backends import Candidate, Choice, Refusal, choose
from .errors import TokenCountMismatch, WrongDtype, WrongShape
from .features import PRODUCTION, Features, why_not_te

# --- row map: rows sorted by expert, the map that takes them back, and the checks of both ---

Path = Literal["te", "native"]


@dataclass(frozen=True, eq=False)
class RowMap:
    """The token of each row; an argument of `Dispatch.unpermute`.

    Attributes:
        path: the backend that made `handle`.
        handle: TE's row map int32 [T, 2 E + 1], or the token of each row, int64 [R].
        routing_map: bool [T, E], without over-capacity tokens.
        tokens_per_expert: its column sums; they sum to R.
        refused: why Transformer Engine was not used; None where it was.
    """

    path: Path
    handle: Any
    routing_map: Any
    tokens_per_expert: tuple[int, ...]
    refused: Refusal | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.routing_map.shape[0])


@dataclass(frozen=True, eq=False)
class Dispatched:
    """Tokens as the experts take them.

    Attributes:
        rows: jagged [R', D], by expert and within an expert by token; padded [E, C, D]. Padding is zeros.
        row_probs: probability of each row, [R'] or [E, C], 0 for padding; None where no probabilities were given.
        rows_per_expert: rows of each expert in `rows` with padding; they sum to R', or are C each.
        tokens_per_expert: the same without padding.
        row_map: the argument of `Dispatch.unpermute`.
    """

    rows: Any
    row_probs: Any
    rows_per_expert: tuple[int, ...]
    tokens_per_expert: tuple[int, ...]
    row_map: RowMap


def check_layout(align: int, capacity: int | None) -> None:
    """Refuse a capacity beside rows in multiples of `align` (WrongShape)."""
    if capacity is not None and align != 1:
        raise WrongShape(
            f"capacity {capacity} and rows in multiples of {align}. Next step: pass `capacity` for the padded layout, "
            "or `align` for the jagged one."
        )


def check_routing(tokens: Any, probs: Any, routing_map: Any, num_experts: int) -> None:
    """Refuse tokens [T, D], probabilities [T, E] or None, and a routing map [T, E] that do not belong together.

    Raises:
        WrongShape, WrongDtype: a wrong rank, size or dtype.
    """
    tables = [routing_map] if probs is None else [routing_map, probs]
    if tokens.dim() != 2 or any(tuple(one.shape) != (tokens.shape[0], num_experts) for one in tables):
        raise WrongShape(
            f"tokens are {list(tokens.shape)}, routing map and probabilities {[list(one.shape) for one in tables]}; "
            f"wanted [T, D] and [T, {num_experts}]. Likely cause: batch and time are not flattened, or the map holds "
            "expert numbers [T, k]. Next step: flatten the tokens, and scatter numbers and top-k values to tables."
        )
    if routing_map.dtype != torch.bool or (probs is not None and not probs.dtype.is_floating_point):
        raise WrongDtype(
            f"routing map and probabilities are {[one.dtype for one in tables]}. Next step: pass a bool map, such as "
            "map != 0, and probabilities in float32."
        )
    if is_float8(tokens) and tokens.requires_grad:
        raise WrongDtype(
            f"tokens are {tokens.dtype} and require a gradient, which bytes do not carry. Next step: dispatch before "
            "quantising."
        )


def check_counts(rows_per_expert: Sequence[int] | Any, routing_map: Any) -> tuple[int, ...]:
    """The caller's numbers of tokens per expert, compared with the routing map [T, E].

    On a GPU the comparison is queued there without a wait: wrong numbers stop the stream by a device-side assertion
    before a kernel writes past its rows.

    Raises:
        TokenCountMismatch: not E numbers from 0 to T, or, on a CPU, not the numbers of the map.
    """
    counts = whole_numbers(rows_per_expert)
    tokens, experts = routing_map.shape
    possible = len(counts) == experts and all(0 <= count <= tokens for count in counts)
    if possible and routing_map.is_cuda:
        same = routing_map.sum(0) == torch.tensor(counts).to(routing_map.device, non_blocking=True)
        torch._assert_async(same.all(), "rows_per_expert does not match the routing map")
    elif not possible or routing_map.sum(0).tolist() != list(counts):
        raise TokenCountMismatch(
            f"rows_per_expert {list(counts)} does not match the routing map {list(routing_map.shape)}. Likely cause: "
            "numbers of another step, of all ranks, or from before tokens were dropped. Next step: take them from this "
            "map, or pass None."
        )
    return counts


def whole_numbers(given: Any) -> tuple[int, ...]:
    """Integers of a sequence or tensor [n]; a tensor of another device is waited for once."""
    return tuple(map(int, given.tolist() if torch.is_tensor(given) else given))


def check_rows(rows: Any, leading: tuple[int, ...]) -> None:
    """Refuse rows that do not fit the map: `leading` are the sizes before D.

    Raises:
        TokenCountMismatch: rows of another layout or number.
        WrongDtype: rows in FP8, which cannot be summed.
    """
    if tuple(rows.shape[:-1]) != leading:
        raise TokenCountMismatch(
            f"rows are {list(rows.shape)}; this map gave {[*leading, 'D']}. Likely cause: the map of another step, the "
            "other layout, or padding already removed. Next step: pass the rows of the permute that made the map."
        )
    if is_float8(rows) or is_quantized(rows):
        raise WrongDtype(
            f"rows are {type(rows).__name__} of {rows.dtype}, and rows of several experts are summed. Next step: "
            "dequantise them first."
        )


def check_chunks(rows: Any, probs: Any, sizes: tuple[int, ...], order: tuple[int, ...]) -> None:
    """Refuse rows [R, D] of another rank, sizes that do not sum to R, and an order that is not a permutation.

    Raises:
        WrongShape, TokenCountMismatch: see above.
    """
    flat = rows.dim() == 2 and (probs is None or probs.shape == rows.shape[:1])
    if not flat or sorted(order) != list(range(len(sizes))):
        raise WrongShape(
            f"rows {list(rows.shape)}, probabilities {None if probs is None else list(probs.shape)}, {len(sizes)} "
            f"chunks in the order {list(order)}. Next step: pass [R, D], [R], and each chunk once."
        )
    if min(sizes, default=0) < 0 or sum(sizes) != rows.shape[0]:
        raise TokenCountMismatch(
            f"chunks of {list(sizes)} rows sum to {sum(sizes)}, and there are {rows.shape[0]} rows. Next step: pass "
            "the sizes with which these rows were received."
        )


def is_float8(tensor: Any) -> bool:
    """Whether this is a plain tensor in one of torch's FP8 dtypes."""
    return bool(tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1)


def is_quantized(tensor: Any) -> bool:
    """Whether this is a quantised tensor of Transformer Engine."""
    return hasattr(tensor, "_fp8_dtype")


# --- permute ---

NATIVE_PATH: Final = "index_select and index_add of plain torch"


def te_permute(tokens: Any, probs: Any, routing_map: Any, *, num_out_tokens: int) -> tuple[Any, Any, Any]:
    """Tokens sorted by expert.

    Args:
        tokens: [T, D].
        probs: [T, E] float32.
        routing_map: [T, E] bool; a row without True is a dropped token.
        num_out_tokens: number of True entries, R.

    Returns:
        Rows [R, D], their probabilities [R], and the map that `moe_unpermute` takes.
    """
    rows, row_probs, row_map = te.moe_permute_with_probs.require()(
        tokens, probs, routing_map, num_out_tokens=num_out_tokens
    )
    return rows, row_probs, row_map


class TePadding:
    """Pads each expert's rows to the multiple that an FP8 GEMM takes, and removes the padding.

    TE's kernels ignore strides, so rows are made contiguous first.
    """

    def __init__(self, num_experts: int, *, align: int) -> None:
        self.pad_rows = te.fp8_padding.require()(num_experts, align_size=align)
        self.unpad_rows = te.fp8_unpadding.require()(num_experts, align_size=align)

    def pad(self, rows: Any, rows_per_expert: Sequence[int]) -> tuple[Any, list[int]]:
        """Rows [R, D] -> rows [R', D] and the padded numbers of rows an expert."""
        padded, counts = self.pad_rows(rows.contiguous(), list(rows_per_expert))
        return padded, counts

    def unpad(self, rows: Any, rows_per_expert: Sequence[int]) -> Any:
        """Rows [R', D] -> rows [R, D]."""
        return self.unpad_rows(rows.contiguous(), list(rows_per_expert))


class Dispatch:
    """MoE dispatch: tokens to the experts and back, on Transformer Engine's kernels or in plain torch.

    Both paths sort rows by expert and within an expert by token, sum over experts in fp32 at least, and round once. A
    token without an expert is dropped, and returns as zeros. As in TE's kernel, a routed token with probability 0 is
    padding: its row is zeros.

    These calls go to "native" although "te" was requested: no rows (TE asserts since 2.15); fp64 (TE sums in fp32);
    probabilities that require a gradient beside tokens that do not (2.12 loses the gradient).

    FP8 payloads move as bytes, without a gradient: tensors of a torch dtype on both paths; TE's quantised tensors only
    on its path, jagged and unaligned, with their scales.

    Args:
        num_experts: E.
        align: in the jagged layout [R, D], each expert's rows are padded to a multiple of this (16 or 32 for FP8).
        capacity: C of the padded layout [E, C, D], where later tokens over an expert's capacity are dropped; jagged
            without it.
        features: whether Transformer Engine may be used.

    Attributes:
        choice: of the last call; None before the first.

    Raises:
        WrongShape: see `check_layout`.
    """

    def __init__(
        self,
        num_experts: int,
        *,
        align: int = 1,
        capacity: int | None = None,
        features: Features = PRODUCTION,
    ) -> None:
        check_layout(align, capacity)
        self.num_experts, self.align, self.capacity = num_experts, align, capacity
        self.features = features
        self.choice: Choice | None = None

    def permute(
        self, tokens: Any, probs: Any, routing_map: Any, *, rows_per_expert: Sequence[int] | None = None
    ) -> Dispatched:
        """Copy each token once for each of its experts.

        Args:
            tokens: [T, D], any dtype, any strides; for FP8 see above.
            probs: [T, E] float32, or None; gradients reach them through `row_probs`.
            routing_map: [T, E] bool.
            rows_per_expert: its E column sums on the host; without them the host waits once for the device.

        Raises:
            WrongShape, WrongDtype: tensors that do not belong together.
            TokenCountMismatch: numbers that do not match the map.
        """
        check_routing(tokens, probs, routing_map, self.num_experts)
        kept, counts = self._keep(routing_map, rows_per_expert)
        payload = tokens.view(torch.uint8) if is_float8(tokens) else tokens
        self.choice = choose("permute", [("te", partial(self._why_not_te, tokens, probs, sum(counts))), _NATIVE])
        if self.choice.observed == "te":
            rows, row_probs, handle = te_permute(payload, probs, kept, num_out_tokens=sum(counts))
            row_map = RowMap("te", handle, kept, counts)
        else:
            rows, row_probs, handle = self._native_permute(payload, probs, kept, sum(counts))
            row_map = RowMap("native", handle, kept, counts, self.choice.refusals[0])
        rows, row_probs = self._lay_out(rows, row_probs if probs is not None else None, row_map)
        rows = rows.view(tokens.dtype) if is_float8(tokens) else rows
        sizes = self._padded(counts) if self.capacity is None else (self.capacity,) * self.num_experts
        return Dispatched(rows, row_probs, sizes, counts, row_map)

    def unpermute(self, rows: Any, row_map: RowMap, *, probs: Any = None) -> Any:
        """Sum each token's rows.

        Args:
            rows: [R', D'] or [E, C, D'], in the layout of `permute`; padding is not read.
            row_map: of that permute.
            probs: [T, E], the weights of the sum; None sums without weights.

        Returns:
            [T, D'] in the dtype of `rows`.

        Raises:
            WrongShape, WrongDtype, TokenCountMismatch: rows or probabilities that do not fit the map.
        """
        counts = row_map.tokens_per_expert
        check_rows(rows, (sum(self._padded(counts)),) if self.capacity is None else (self.num_experts, self.capacity))
        check_routing(row_map.routing_map, probs, row_map.routing_map, self.num_experts)
        ask = partial(self._why_not_back, rows, probs, row_map)
        self.choice = choose("permute", [("te", ask), _NATIVE])
        if self.capacity is not None:
            rows = from_padded(rows, counts)
        elif self.align > 1 and self.choice.observed == "te":
            rows = TePadding(self.num_experts, align=self.align).unpad(rows, counts)
        elif self.align > 1:
            rows = unpad_rows(rows, counts, self.align)
        if self.choice.observed == "te":
            shape = (row_map.num_tokens, rows.shape[1])
            unpermuted = te.moe_unpermute.require()
            return unpermuted(rows, row_map.handle, merging_probs=probs, restore_shape=shape, map_type="mask")
        row_ids = row_map.handle if row_map.path == "native" else row_map.routing_map.t().nonzero()[:, 1]
        weights = None if probs is None else _of_each_row(probs, row_ids, counts)
        return unpermute(rows, row_ids, num_tokens=row_map.num_tokens, row_probs=weights)

    def sort_chunks(
        self, rows: Any, sizes: Sequence[int] | Any, order: Sequence[int] | Any, *, probs: Any = None
    ) -> tuple[Any, Any]:
        """Put chunks of rows into another order, as between an all-to-all and the experts.

        Args:
            rows: [R, D], any dtype; jagged, whatever the layout of this dispatch.
            sizes: rows of each chunk; they sum to R. The host waits for a tensor on a device.
            order: the number of the first chunk of the result, of the second, and so on.
            probs: [R], moved with the rows; or None.

        Returns:
            Rows [R, D], and probabilities [R] or None.

        Raises:
            WrongShape, TokenCountMismatch: see `check_chunks`.
            WrongDtype: a quantised tensor of TE with a scale for each block.
        """
        sizes, order = whole_numbers(sizes), whole_numbers(order)
        check_chunks(rows, probs, sizes, order)
        self.choice = choose("permute", [("te", partial(self._why_not_te, rows, probs, rows.shape[0])), _NATIVE])
        payload = rows.view(torch.uint8) if is_float8(rows) else rows
        if is_quantized(rows) and (self.choice.observed != "te" or not hasattr(rows, "_data")):
            raise _not_movable(rows, self.choice)
        if self.choice.observed == "te":
            chunks = torch.tensor([sizes, order], dtype=torch.int32).to(rows.device, non_blocking=True)
            if probs is None:
                moved = te.moe_sort_chunks_by_index.require()(payload, chunks[0], chunks[1])
            else:
                sort_with_probs = te.moe_sort_chunks_by_index_with_probs.require()
                moved, probs = sort_with_probs(payload, probs, chunks[0], chunks[1])
        else:
            moved = sort_chunks(payload, sizes, order)
            probs = probs if probs is None else sort_chunks(probs, sizes, order)
        return moved.view(rows.dtype) if is_float8(rows) else moved, probs

    def _keep(self, routing_map: Any, rows_per_expert: Sequence[int] | None) -> tuple[Any, tuple[int, ...]]:
        """The routing map without tokens over capacity, and the tokens of each expert in it."""
        kept = routing_map if self.capacity is None else drop_over_capacity(routing_map, self.capacity)
        if rows_per_expert is None:
            return kept, whole_numbers(kept.sum(0))
        counts = check_counts(rows_per_expert, routing_map)
        return kept, counts if self.capacity is None else tuple(min(count, self.capacity) for count in counts)

    def _why_not_te(self, rows: Any, probs: Any, count: int) -> Refusal | None:
        refused = why_not_te(self.features, "permute", rows.device)
        if refused is not None:
            return refused
        if not count or not rows.shape[-1]:
            return Refusal("te", "no-rows", "nothing is routed: there is nothing to launch")
        if rows.dtype == torch.float64:
            return Refusal("te", "dtype", "Transformer Engine sums in fp32, and the rows are fp64")
        if torch.is_grad_enabled() and probs is not None and probs.requires_grad and not rows.requires_grad:
            lost = "the probabilities require a gradient and the rows do not: Transformer Engine 2.12 returns none"
            return Refusal("te", "gradient-of-probs-alone", lost)
        return None

    def _why_not_back(self, rows: Any, probs: Any, row_map: RowMap) -> Refusal | None:
        """A native row map is unpermuted natively, for the reason of its permute."""
        return row_map.refused or self._why_not_te(rows, probs, sum(row_map.tokens_per_expert))

    def _native_permute(self, payload: Any, probs: Any, kept: Any, count: int) -> tuple[Any, Any, Any]:
        if not is_quantized(payload):
            rows, row_probs, row_ids = permute(payload, probs, kept)
            if row_probs is not None:
                rows = rows.masked_fill((row_probs == 0).unsqueeze(-1), 0)
            return rows, row_probs, row_ids
        if count:
            raise _not_movable(payload, self.choice)
        nothing = torch.empty(0, payload.shape[1], dtype=payload.dtype, device=payload.device)
        return nothing, None if probs is None else probs.reshape(-1)[:0], kept.new_empty(0, dtype=torch.int64)

    def _lay_out(self, rows: Any, row_probs: Any, row_map: RowMap) -> tuple[Any, Any]:
        """Jagged rows [R, D] and their probabilities [R] in this dispatch's layout."""
        counts = row_map.tokens_per_expert
        if self.capacity is None and self.align == 1:
            return rows, row_probs
        if is_quantized(rows):
            raise _not_movable(rows, self.choice)
        column = None if row_probs is None else row_probs.unsqueeze(-1)
        if self.capacity is not None:
            laid = to_padded(rows, counts, self.capacity)
            return laid, None if column is None else to_padded(column, counts, self.capacity).squeeze(-1)
        if row_map.path == "te":
            laid, _ = TePadding(self.num_experts, align=self.align).pad(rows, counts)
        else:
            laid, _ = pad_rows(rows, counts, self.align)
        return laid, None if column is None else pad_rows(column, counts, self.align)[0].squeeze(-1)

    def _padded(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(padded_counts(counts, self.align))


_NATIVE: Final[Candidate] = ("native", lambda: None)


def _of_each_row(probs: Any, row_ids: Any, counts: tuple[int, ...]) -> Any:
    """The probability of each row [R] out of probs [T, E], without waiting for the device."""
    experts = torch.tensor([range(len(counts)), counts]).to(probs.device, non_blocking=True)
    expert = experts[0].repeat_interleave(experts[1], output_size=sum(counts))
    return probs.reshape(-1).index_select(0, row_ids * len(counts) + expert)


def _not_movable(rows: Any, choice: Choice | None) -> WrongDtype:
    refused = f" (not used: {choice.refusals[0].reason})" if choice is not None and choice.refusals else ""
    return WrongDtype(
        f"rows are a {type(rows).__name__}, which only Transformer Engine moves{refused}, jagged and unaligned; "
        "chunks only with one scale a tensor. Next step: move its bytes as a plain tensor, or dequantise it."
    )


# --- padded experts: permute, pad, batched products, unpad, unpermute ---


def padded_moe(
    tokens: Any, routing_map: Any, probs: Any, up_weight: Any, down_weight: Any, *, features: Features = PRODUCTION
) -> Any:
    """Each token through its experts, in batches as high as the busiest expert has rows, summed with probabilities.

    Args:
        tokens: [T, D].
        routing_map: [T, E] bool.
        probs: [T, E] float32 at least; values of tokens that are not routed are not used.
        up_weight: [E, 2F, D] in the dtype of the tokens, the gate first.
        down_weight: [E, D, F], likewise.
        features: whether Transformer Engine may permute.

    Returns:
        [T, D] in the dtype of the tokens.

    Raises:
        WrongShape, WrongDtype: see `Dispatch`.
    """
    counts = routing_map.sum(dim=0).tolist()  # the host waits here
    dispatch = Dispatch(len(counts), capacity=max(1, *counts), features=features)
    sent = dispatch.permute(tokens, None, routing_map, rows_per_expert=counts)
    with without_autocast(tokens):
        inner = activation(torch.bmm(sent.rows, up_weight.transpose(1, 2)), "swiglu")
        out = torch.bmm(inner, down_weight.transpose(1, 2))
    return dispatch.unpermute(out, sent.row_map, probs=probs)
