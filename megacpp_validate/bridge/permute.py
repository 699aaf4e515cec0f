"""TE permute bridge: MoE dispatch with probabilities, padding and chunk sorting; the TE side of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import imports as te

NATIVE_PATH = "index_select and index_add of plain torch"


def te_permute(tokens: Any, probs: Any, routing_map: Any, *, num_out_tokens: int) -> tuple[Any, Any, Any]:
    """Tokens sorted by expert.

    Args:
        tokens: [T, D].
        probs: [T, E] float32.
        routing_map: [T, E] bool; a row without True is a dropped token.
        num_out_tokens: number of True entries, R.

    Returns:
        Rows [R, D], their probabilities [R], and the map that `te_unpermute` takes.
    """
    rows, row_probs, row_map = te.moe_permute_with_probs.require()(
        tokens, probs, routing_map, num_out_tokens=num_out_tokens
    )
    return rows, row_probs, row_map


def te_unpermute(rows: Any, row_map: Any, *, probs: Any, shape: Any) -> Any:
    """Rows [R, D] back to tokens of `shape` [T, D], weighted by `probs` [T, E] and summed over experts."""
    return te.moe_unpermute.require()(rows, row_map, merging_probs=probs, restore_shape=shape, map_type="mask")


def te_sort_chunks(rows: Any, sizes: Any, order: Any) -> Any:
    """Chunks of rows [R, D] of the given `sizes` [C] in another `order` [C]."""
    return te.moe_sort_chunks_by_index.require()(rows, sizes, order)


def te_sort_chunks_with_probs(rows: Any, probs: Any, sizes: Any, order: Any) -> tuple[Any, Any]:
    """The same, with the probabilities [R] of the rows."""
    moved, moved_probs = te.moe_sort_chunks_by_index_with_probs.require()(rows, probs, sizes, order)
    return moved, moved_probs


class TePadding:
    """Pads each expert's rows to the multiple that an FP8 GEMM takes, and takes the padding out again."""

    def __init__(self, num_experts: int, *, align: int) -> None:
        self.pad_rows = te.fp8_padding.require()(num_experts, align_size=align)
        self.unpad_rows = te.fp8_unpadding.require()(num_experts, align_size=align)

    def pad(self, rows: Any, rows_per_expert: Sequence[int]) -> tuple[Any, list[int]]:
        """Rows [R, D] -> rows [R', D] and the padded numbers of rows an expert."""
        padded, counts = self.pad_rows(rows, list(rows_per_expert))
        return padded, counts

    def unpad(self, rows: Any, rows_per_expert: Sequence[int]) -> Any:
        """Rows [R', D] -> rows [R, D]."""
        return self.unpad_rows(rows, list(rows_per_expert))
