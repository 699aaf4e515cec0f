"""The A-block against the same written out in fp64, and what must hold of it whatever its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_validate.native.attention import attention_mask, rope_tables
from megacpp_validate.native.block import ABlock

HIDDEN, FFN, HEADS, WIDTH = 24, 40, 8, 6
LENGTH = 11
PACKED = torch.tensor([[0] * 4 + [1] * 7, [0] * 11])


def make_block(groups: int = 2, dtype: Any = torch.float64, **options: Any) -> Any:
    """Weights of a size at which every part of the block counts."""
    block = ABlock(HIDDEN, FFN, HEADS, WIDTH, groups, dtype=dtype, **options)
    source = torch.Generator().manual_seed(3)
    for parameter in block.parameters():
        drawn = torch.randn(parameter.shape, generator=source, dtype=torch.float64)
        parameter.data.copy_(2 * drawn / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 1 + 0.3 * drawn)
    return block


def make_rows(length: int = LENGTH, dtype: Any = torch.float64, seed: int = 0) -> Any:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(2, length, HIDDEN, generator=source, dtype=torch.float64).to(dtype)


def tables(length: int = LENGTH + 5) -> tuple[Any, Any]:
    return rope_tables(length, WIDTH, dtype=torch.float64)


def written_out(block: Any, rows: Any, *, rope: Any = None, doc_ids: Any = None, window: int | None = None) -> Any:
    """The block from its weights, without a function of it but the mask."""
    weights = {name: weight.double() for name, weight in block.named_parameters()}
    groups, share = block.num_gqa_groups, HEADS // block.num_gqa_groups

    def norm(x: Any, weight: Any) -> Any:
        return x * (x.square().mean(-1, keepdim=True) + block.qkv.eps) ** -0.5 * weight

    def turn(x: Any) -> Any:
        if rope is None:
            return x
        cos, sin = (table[: rows.shape[1], None] for table in rope)
        first, second = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
        return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)

    mixed = norm(rows, weights["qkv.layer_norm_weight"]) @ weights["qkv.weight"].T
    ends = HEADS * WIDTH, (HEADS + groups) * WIDTH
    query = turn(mixed[..., : ends[0]].reshape(*rows.shape[:2], groups, share, WIDTH).flatten(2, 3))
    key = turn(mixed[..., ends[0] : ends[1]].reshape(*rows.shape[:2], groups, WIDTH))
    value = mixed[..., ends[1] :].reshape(*rows.shape[:2], groups, WIDTH)
    scores = torch.einsum("btgsd,bugd->bgstu", query.unflatten(2, (groups, share)), key) / WIDTH**0.5
    mask = attention_mask(rows.shape[1], rows.shape[1], doc_ids=doc_ids, window=window)
    scores = scores.masked_fill(~(mask if doc_ids is None else mask[:, None]), -torch.inf)
    seen = torch.einsum("bgstu,bugd->btgsd", scores.softmax(-1), value).flatten(2)
    rows = rows + seen @ weights["out.weight"].T
    up = norm(rows, weights["mlp.layer_norm_weight"]) @ weights["mlp.fc1_weight"].T
    gate, linear = up[..., :FFN], up[..., FFN:]
    return rows + (gate * torch.sigmoid(gate) * linear) @ weights["mlp.fc2_weight"].T


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "rope": lambda: {"rope": tables()},
    "packed": lambda: {"rope": tables(), "doc_ids": PACKED},
    "window": lambda: {"rope": tables(), "window": 3},
    "packed and window": lambda: {"doc_ids": PACKED, "window": 2},
}


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_its_formula_forward_and_backward(name: str, groups: int) -> None:
    block, options = make_block(groups), OPTIONS[name]()
    rows, upstream = make_rows().requires_grad_(), make_rows(seed=1)
    given = [rows, *block.parameters()]
    seen, wanted = block(rows, **options), written_out(block, rows, **options)
    torch.testing.assert_close(seen, wanted, rtol=1e-11, atol=1e-11)
    for one, other in zip(
        torch.autograd.grad(seen, given, upstream), torch.autograd.grad(wanted, given, upstream), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
