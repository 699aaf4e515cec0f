"""What MoE dispatch hands on: rows sorted by expert, and the map that takes them back; with the checks of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final, Literal, get_args

import torch

from .backends import Refusal
from .errors import TokenCountMismatch, UnknownName, WrongDtype, WrongOption, WrongShape, WrongTarget

Layout = Literal["jagged", "padded"]
Path = Literal["te", "native"]

LAYOUTS: Final[tuple[Layout, ...]] = get_args(Layout)


@dataclass(frozen=True, eq=False)
class RowMap:
    """Which token each row is a copy of. What is in it is for `Dispatch.unpermute` alone.

    Attributes:
        path: who made `handle`.
        handle: TE's row map int32 [T, 2 E + 1], or the token of each row, int64 [R].
        routing_map: bool [T, E], over-capacity tokens taken out.
        tokens_per_expert: its column sums; they sum to R.
        refused: why Transformer Engine was passed over, where it was.
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
        rows_per_expert: rows of each expert in `rows`, padding included: they sum to R', or are C each.
        tokens_per_expert: the same without padding.
        row_map: for the way back.
    """

    rows: Any
    row_probs: Any
    rows_per_expert: tuple[int, ...]
    tokens_per_expert: tuple[int, ...]
    row_map: RowMap


def check_layout(num_experts: int, layout: Layout, align: int, capacity: int | None) -> None:
    """Refuse a layout that cannot be.

    Raises:
        UnknownName: there is no such layout.
        WrongOption: a number that is not whole.
        WrongShape: a number below 1; a capacity without the padded layout or the reverse; padding asked for twice.
    """
    if layout not in LAYOUTS:
        raise UnknownName(f"there is no layout {layout!r}. Next step: choose one of {', '.join(LAYOUTS)}.")
    numbers = (num_experts, align) if capacity is None else (num_experts, align, capacity)
    if not all(isinstance(number, Integral) for number in numbers):
        raise WrongOption(
            f"{num_experts!r} experts, rows in multiples of {align!r}, capacity {capacity!r}: each must be a whole "
            "number. Likely cause: a capacity factor that was not rounded. Next step: math.ceil(capacity)."
        )
    if min(numbers) < 1:
        raise WrongShape(
            f"{num_experts} experts, rows in multiples of {align}, capacity {capacity}: each must be 1 or more. Next "
            "step: read them from the model's configuration."
        )
    if (layout == "padded") != (capacity is not None) or (layout == "padded" and align != 1):
        raise WrongShape(
            f"layout {layout} with capacity {capacity} and rows in multiples of {align}. Likely cause: the padded "
            "layout needs a capacity, which is its only alignment; the jagged one has none. Next step: give `capacity` "
            "with layout='padded', or `align` with layout='jagged'."
        )


def check_routing(tokens: Any, probs: Any, routing_map: Any, num_experts: int) -> None:
    """Refuse tokens [T, D], probabilities [T, E] and a routing map [T, E] that do not belong together.

    Raises:
        WrongShape, WrongDtype, WrongTarget: a rank, size, dtype or device that cannot be; the text says which.
    """
    if tokens.dim() != 2 or tuple(routing_map.shape) != (tokens.shape[0], num_experts):
        raise WrongShape(
            f"tokens {list(tokens.shape)} and routing map {list(routing_map.shape)}; wanted [T, D] and "
            f"[T, {num_experts}]. Likely cause: batch and time are not flattened, or the map holds expert numbers "
            "[T, k]. Next step: flatten them alike, and scatter numbers to a bool map."
        )
    if routing_map.dtype != torch.bool:
        raise WrongDtype(f"the routing map is {routing_map.dtype}. Next step: pass a bool one, such as map != 0.")
    check_probs(probs, routing_map)
    if is_float8(tokens) and tokens.requires_grad:
        raise WrongDtype(
            f"tokens are {tokens.dtype} and require a gradient, which bytes do not carry. Next step: quantise inside "
            "an autograd function of your own, or dispatch before quantising."
        )
    if tokens.device != routing_map.device:
        raise WrongTarget(
            f"tokens lie on {tokens.device} and the map on {routing_map.device}. Next step: move them to one device."
        )


def check_probs(probs: Any, routing_map: Any) -> None:
    """Refuse probabilities that do not belong to a routing map [T, E]; None is none.

    Raises:
        WrongShape, WrongDtype, WrongTarget: another shape, a dtype without fractions, another device.
    """
    if probs is None:
        return
    if probs.shape != routing_map.shape:
        raise WrongShape(
            f"probabilities {list(probs.shape)}; wanted {list(routing_map.shape)}, one for each token and expert. "
            "Likely cause: the top-k values [T, k], or those of rows. Next step: scatter them to the shape of the map."
        )
    if not probs.dtype.is_floating_point:
        raise WrongDtype(f"the probabilities are {probs.dtype}. Next step: pass them in float32, as the router does.")
    if probs.device != routing_map.device:
        raise WrongTarget(
            f"probabilities lie on {probs.device} and the map on {routing_map.device}. Next step: move them to one."
        )


def check_counts(rows_per_expert: Sequence[int] | Any, routing_map: Any) -> tuple[int, ...]:
    """The caller's own numbers of tokens an expert, held to the routing map [T, E].

    On a GPU the comparison is queued there, and nothing waits for it: wrong numbers stop the stream by a device-side
    assertion before a kernel writes past the rows that it was given.

    Raises:
        TokenCountMismatch: not E numbers from 0 to T, or, on a CPU, not those of the map.
    """
    counts = whole_numbers(rows_per_expert)
    tokens, experts = routing_map.shape
    possible = len(counts) == experts and all(0 <= count <= tokens for count in counts)
    if possible and routing_map.is_cuda:
        same = routing_map.sum(0) == torch.tensor(counts).to(routing_map.device, non_blocking=True)
        torch._assert_async(same.all(), "rows_per_expert is not what the routing map holds")
    elif not possible or routing_map.sum(0).tolist() != list(counts):
        raise TokenCountMismatch(
            f"rows_per_expert {list(counts)} is not what the routing map {list(routing_map.shape)} holds. Likely "
            "cause: numbers of another step, of all ranks, or from before tokens were dropped. Next step: take them "
            "from this map, or pass none."
        )
    return counts


def whole_numbers(given: Any) -> tuple[int, ...]:
    """Numbers of rows as they are given, a sequence or a tensor [n]; what lies on another device is waited for once.

    Raises:
        TokenCountMismatch: one that is no whole number: to round it would lose rows without a word.
    """
    try:
        values = given.tolist() if torch.is_tensor(given) else given
        values = tuple(value.item() if torch.is_tensor(value) else value for value in values)
        counts = tuple(map(int, values))
    except (TypeError, ValueError, OverflowError, RuntimeError):  # no sequence, no number, NaN, infinite, many numbers
        values, counts = (None,), ()
    if counts != values:
        raise TokenCountMismatch(
            f"{given!r} are no whole numbers of rows. Likely cause: shares or averages, or a tensor that is not [n]. "
            "Next step: pass integers, such as routing_map.sum(0)."
        )
    return counts


def check_map(row_map: RowMap, num_experts: int, capacity: int | None) -> None:
    """Refuse the row map of another dispatch (TokenCountMismatch): of other experts, or of a larger capacity."""
    counts = row_map.tokens_per_expert
    if len(counts) != num_experts or (capacity is not None and max(counts) > capacity):
        raise TokenCountMismatch(
            f"the map is of {len(counts)} experts with {max(counts, default=0)} rows at most; this dispatch has "
            f"{num_experts}, capacity {capacity}. Likely cause: two dispatches in one model. Next step: go back by "
            "the one that made the map."
        )


def check_rows(rows: Any, leading: tuple[int, ...]) -> None:
    """Refuse rows that are not those of the map: `leading` are the sizes before D.

    Raises:
        WrongShape: another rank.
        TokenCountMismatch: another number of rows.
        WrongDtype: rows that cannot be summed.
    """
    if rows.dim() != len(leading) + 1:
        raise WrongShape(
            f"rows are {list(rows.shape)}; wanted {[*leading, 'D']}. Likely cause: the other layout, padded "
            "[E, C, D] or jagged [R, D]. Next step: pass them as permute gave them."
        )
    if tuple(rows.shape[:-1]) != leading:
        raise TokenCountMismatch(
            f"rows are {list(rows.shape)}; this map gave {[*leading, 'D']}. Likely cause: the map of another step, or "
            "padding taken out already. Next step: pass the rows of the permute that made the map."
        )
    if is_float8(rows) or is_quantized(rows):
        raise WrongDtype(
            f"rows are {type(rows).__name__} of {rows.dtype}: rows of several experts are summed, which FP8 does not "
            "hold. Next step: dequantise them first."
        )


def check_chunks(rows: Any, probs: Any, sizes: tuple[int, ...], order: tuple[int, ...]) -> None:
    """Refuse chunk sizes that do not sum to the rows [R, D], and an order that is none.

    Raises:
        WrongShape: another rank, probabilities of other rows, or an order that does not name each chunk once.
        TokenCountMismatch: sizes below zero or of another sum.
    """
    if rows.dim() != 2 or (probs is not None and probs.shape != rows.shape[:1]):
        seen = None if probs is None else list(probs.shape)
        raise WrongShape(f"rows {list(rows.shape)}, probabilities {seen}; wanted [R, D] and [R]. Next step: flatten.")
    if min(sizes, default=0) < 0 or sum(sizes) != rows.shape[0]:
        raise TokenCountMismatch(
            f"chunks of {list(sizes)} rows sum to {sum(sizes)}, and there are {rows.shape[0]}. Likely cause: sizes of "
            "another step or of one rank. Next step: pass the sizes with which these rows were received."
        )
    if sorted(order) != list(range(len(sizes))):
        raise WrongShape(
            f"the order {list(order)} does not name each of {len(sizes)} chunks once. Next step: pass a permutation."
        )


def is_float8(tensor: Any) -> bool:
    """Whether this is a plain tensor in one of torch's FP8 dtypes."""
    return bool(tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1)


def is_quantized(tensor: Any) -> bool:
    """Whether this is one of Transformer Engine's quantised tensors: they say what their bytes are."""
    return hasattr(tensor, "_fp8_dtype")
