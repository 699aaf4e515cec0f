"""A mixture of experts for tests, on one rank and on several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megacpp_validate.native.grouped_gemm import grouped_gemm
from megacpp_validate.native.permute import permute, unpermute
from megacpp_validate.training.parallel.expert_parallel import ExpertExchange

HIDDEN, WIDTH, EXPERTS, TOP_K = 6, 5, 8, 2
NAMES = ("tokens", "gate", "up", "down", "cotangent")
# Tokens of each rank: uneven, and one rank that has none. Experts that no token reaches: 1 on every world; on 4 ranks
# 2 and 3 are all that rank 1 holds.
TOKENS = {2: (9, 4), 4: (5, 0, 7, 3)}
IDLE = (1, 2, 3)


def make_data(tokens: int, *, whole: bool) -> SimpleNamespace:
    """fp64; small whole numbers, of which every sum is exact in any order, or normal ones."""
    drawn = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Any:
        if whole:
            return torch.randint(-3, 4, shape, generator=drawn).double()
        return torch.randn(*shape, generator=drawn, dtype=torch.float64)

    scores = torch.rand(tokens, EXPERTS, generator=drawn)
    scores[:, list(IDLE)] = -1
    chosen = torch.zeros(tokens, EXPERTS, dtype=torch.bool).scatter(1, scores.topk(TOP_K).indices, True)
    shapes = ((tokens, HIDDEN), (EXPERTS, HIDDEN), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH), (tokens, HIDDEN))
    return SimpleNamespace(chosen=chosen, **dict(zip(NAMES, (draw(*shape) for shape in shapes), strict=True)))


def run_layer(data: Any, exchange: ExpertExchange | None = None, *, absolute: bool = False) -> dict[str, Any]:
    """Output and gradients of a mixture of experts: gate, permute, two products with a ReLU between, unpermute."""
    leaves = {name: getattr(data, name).clone().requires_grad_() for name in NAMES[:-1]}

    def bank(rows: Any, counts: Any) -> Any:
        inner = grouped_gemm(rows, leaves["up"], list(counts))
        return grouped_gemm(inner if absolute else inner.relu(), leaves["down"], list(counts))

    rows, probs, ids = permute(leaves["tokens"], leaves["tokens"] @ leaves["gate"].t(), data.chosen)
    counts = data.chosen.sum(0).tolist()
    out = bank(rows, counts) if exchange is None else exchange.run(rows, counts, bank)
    mixed = unpermute(out, ids, num_tokens=len(data.tokens), row_probs=probs)
    (mixed * data.cotangent).sum().backward()
    return {"out": mixed.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def part_of(data: Any, world: int, rank: int) -> Any:
    """A rank's tokens and experts."""
    first = sum(TOKENS[world][:rank])
    tokens = slice(first, first + TOKENS[world][rank])
    experts = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    return SimpleNamespace(
        chosen=data.chosen[tokens],
        tokens=data.tokens[tokens],
        cotangent=data.cotangent[tokens],
        gate=data.gate,
        up=data.up[experts],
        down=data.down[experts],
    )
