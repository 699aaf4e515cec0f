"""MoE dispatch."""

from __future__ import annotations

from typing import Any

import torch

from .gemm import Mark


class _Permutation(Mark):
    """The name that the graph shows."""


class _Permute(torch.autograd.Function):
    """Tokens [T, D] copied to rows [R, D]; gradients are summed in fp32, as TE's kernel sums them.

    Rows whose probability is exactly 0 are zeroed, as in TE; their gradient passes all the same, as it does there.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Any, token: Any, unused: Any) -> Any:
        """`token` [R] of each row; `unused` [R] bool, or None."""
        ctx.save_for_backward(token)
        ctx.shape = tokens.shape
        rows = tokens[token]
        return rows if unused is None else rows.masked_fill(unused[:, None], 0)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """[R, D] -> [T, D]."""
        (token,) = ctx.saved_tensors
        summed = torch.zeros(ctx.shape, dtype=torch.float32, device=grad.device).index_add(0, token, grad.float())
        return summed.to(grad.dtype), None, None


def _row_map(routing_map: Any) -> Any:
    """[T, E] -> [T, 2 E + 1] int32: of each token its rows, then its experts, then how many of them there are."""
    tokens, experts = routing_map.shape
    routed = routing_map.bool()
    rows = torch.full((tokens, 2 * experts + 1), -1, dtype=torch.int32, device=routing_map.device)
    row_of = routed.t().reshape(-1).cumsum(0).view(experts, tokens).t() - 1  # expert by expert, then by token
    place = routed.cumsum(1) - 1
    token, expert = routed.nonzero(as_tuple=True)
    at = place[token, expert]
    rows[token, at] = row_of[token, expert].int()
    rows[token, experts + at] = expert.int()
    rows[:, -1] = routed.sum(1).int()
    return rows


def _entries(row_map: Any) -> tuple[Any, Any, Any]:
    """Token, expert and row of each entry of a row map."""
    experts = (row_map.shape[1] - 1) // 2
    token, at = (row_map[:, :experts] >= 0).nonzero(as_tuple=True)
    return token, row_map[token, experts + at].long(), row_map[token, at].long()


def moe_permute_with_probs(inp: Any, probs: Any, routing_map: Any, num_out_tokens: int) -> tuple[Any, Any, Any]:
    """Tokens [T, D], probs [T, E] or None, routing map [T, E] -> rows [R, D], their probs [R], row map."""
    row_map = _row_map(routing_map)
    token, expert, row = _entries(row_map)
    if num_out_tokens != row.numel():
        raise NotImplementedError(f"the double of Transformer Engine takes num_out_tokens={row.numel()} rows only")
    order = row.argsort()
    if probs is None:
        return _Permute.apply(inp, token[order], None), torch.empty(0, device=inp.device), row_map
    row_probs = probs[token[order], expert[order]]
    rows = _Permute.apply(inp, token[order], row_probs.detach() == 0)
    return rows, _Permutation.apply(row_probs), row_map


def moe_unpermute(
    inp: Any,
    row_id_map: Any,
    merging_probs: Any = None,
    restore_shape: Any = None,
    map_type: str = "mask",
    probs: Any = None,
    pad_offsets: Any = None,
) -> Any:
    """Rows [R, D] -> tokens of `restore_shape` [T, D], weighted by `merging_probs` [T, E], summed in fp32."""
    if map_type != "mask" or probs is not None or pad_offsets is not None:
        raise NotImplementedError("the double of Transformer Engine takes map_type='mask' and merging_probs only")
    token, expert, row = _entries(row_id_map)
    parts = inp[row].float()
    if merging_probs is not None:
        parts = parts * merging_probs[token, expert].float()[:, None]
    shape = inp.shape if restore_shape is None else restore_shape
    out = torch.zeros(tuple(shape), dtype=torch.float32, device=inp.device).index_add(0, token, parts)
    return _Permutation.apply(out.to(inp.dtype))


def _chunk_order(split_sizes: Any, sorted_index: Any, rows: int) -> Any:
    sizes = split_sizes.tolist()
    if sum(sizes) != rows:
        raise ValueError(f"split_sizes {sizes} do not sum to {rows} rows")
    chunks = torch.arange(rows, device=split_sizes.device).split(sizes)
    return torch.cat([chunks[index] for index in sorted_index.tolist()])


def moe_sort_chunks_by_index(inp: Any, split_sizes: Any, sorted_index: Any) -> Any:
    """Chunks of rows [R, D]; chunk `sorted_index[0]` comes first."""
    return _Permutation.apply(inp[_chunk_order(split_sizes, sorted_index, inp.shape[0])])


def moe_sort_chunks_by_index_with_probs(inp: Any, probs: Any, split_sizes: Any, sorted_index: Any) -> tuple[Any, Any]:
    """The same with the probs [R] of the rows."""
    order = _chunk_order(split_sizes, sorted_index, inp.shape[0])
    return _Permutation.apply(inp[order]), _Permutation.apply(probs[order])
