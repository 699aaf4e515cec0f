"""Experts on 2 and 4 real ranks compute what one rank does, by both banks; rows that are swapped or lost are named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from megacpp_validate.bridge.jagged_experts import jagged_moe, jagged_rows
from megacpp_validate.native.grouped_gemm import grouped_gemm
from megacpp_validate.native.mlp import activation
from megacpp_validate.native.permute import permute, unpermute
from megacpp_validate.training.parallel import exchange as exchanges
from megacpp_validate.training.parallel.checks import TokensNotConserved, check_routed
from megacpp_validate.training.parallel.exchange import ExpertExchange
from tests.training.parallel.gloo_ranks import on_ranks

pytestmark = pytest.mark.thorough

HIDDEN, WIDTH, EXPERTS, TOP_K = 16, 8, 8, 3  # on 4 ranks a token has more experts than a rank
# Uneven, and one rank without tokens; experts 1 to 3 are idle: on 4 ranks rank 1 holds 2 and 3, and gets no row.
TOKENS = {2: (9, 4), 4: (5, 0, 7, 3)}
IDLE = [1, 2, 3]
LEAVES = ("tokens", "weights", "up", "down")
# Relative, in the norm: a number passes sums of at most 16 terms, three products deep and back, then k rows and up to
# 15 tokens, each term off by 2^-53: below (6 x 16 + 3 + 15) x 2^-53 if all add up; doubled for the second of the two
# that are compared, and again for the division by norms that cancelled.
BOUND = 4 * 114 * 2.0**-53


def make_data(world: int, rank: int | None = None) -> SimpleNamespace:
    """Tokens and experts of all ranks, or of one."""
    drawn, count = torch.Generator().manual_seed(7), sum(TOKENS[world])

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=drawn, dtype=torch.float64)

    logits = draw(count, EXPERTS)
    logits[:, IDLE] = float("-inf")
    weights, chosen = logits.softmax(dim=-1).topk(TOP_K, dim=-1)
    of_tokens = {"tokens": draw(count, HIDDEN), "chosen": chosen, "weights": weights, "gradient": draw(count, HIDDEN)}
    of_experts = {"up": draw(EXPERTS, 2 * WIDTH, HIDDEN), "down": draw(EXPERTS, HIDDEN, WIDTH)}
    if rank is None:
        return SimpleNamespace(**of_tokens, **of_experts)
    mine = {name: one.split(TOKENS[world])[rank] for name, one in of_tokens.items()}
    return SimpleNamespace(**mine, **{name: one.chunk(world)[rank] for name, one in of_experts.items()})


def differentiate(layer: Any, data: Any) -> dict[str, Any]:
    given = [getattr(data, name).clone().requires_grad_() for name in LEAVES]
    out = layer(given[0], data.chosen, *given[1:])
    return dict(zip(("out", *LEAVES), (out.detach(), *torch.autograd.grad(out, given, data.gradient)), strict=True))


def run_loop(rows: Any, counts: Any, up: Any, down: Any) -> Any:
    return grouped_gemm(activation(grouped_gemm(rows, up, list(counts)), "swiglu"), down, list(counts))


BANKS = {"loop": run_loop, "jagged": jagged_rows}


def over_ranks(bank: Any) -> Any:
    def layer(tokens: Any, chosen: Any, weights: Any, up: Any, down: Any) -> Any:
        routed = torch.zeros(len(tokens), EXPERTS, dtype=torch.bool).scatter(1, chosen, True)
        probs = torch.zeros(len(tokens), EXPERTS, dtype=weights.dtype).scatter(1, chosen, weights)
        rows, scale, ids = permute(tokens, probs, routed)
        exchange = ExpertExchange(EXPERTS, audit=True)
        sent, received = exchange.exchange_counts(routed.sum(0))
        out = exchange.run(rows, sent, received, lambda *given: bank(*given, up, down))
        return unpermute(out, ids, num_tokens=len(tokens), row_probs=scale)

    return layer


def everything_on_a_rank() -> dict[str, Any]:
    world, rank = distributed.get_world_size(), distributed.get_rank()
    mine = make_data(world, rank)
    seen = {name: differentiate(over_ranks(bank), mine) for name, bank in BANKS.items()}
    routed = torch.zeros(len(mine.chosen), EXPERTS, dtype=torch.bool).scatter(1, mine.chosen, True)
    sent = routed.sum(0).tolist()
    check_routed(sent, routed)
    with pytest.raises(TokensNotConserved) as caught:
        check_routed([*sent[:-1], sent[-1] + (rank == 1)], routed)
    assert caught.value.where == {"experts": [EXPERTS - 1], "source": 1}
    real, calls = exchanges.exchange_rows, []

    def swap_second(rows: Any, *rest: Any) -> Any:
        calls.append(1)
        return real(rows.flip(0) if rank == world - 1 and len(calls) == 2 else rows, *rest)

    exchanges.exchange_rows = swap_second  # in a process of its own
    with pytest.raises(TokensNotConserved, match="combine") as caught:
        differentiate(over_ranks(run_loop), mine)
    assert (caught.value.where["stage"], caught.value.where["source"]) == ("combine", world - 1)
    return seen


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_compute_what_one_does(world: int) -> None:
    wanted = differentiate(jagged_moe, make_data(world))
    ranks = on_ranks(world, everything_on_a_rank)
    for bank in BANKS:
        for name, value in wanted.items():
            found = torch.cat([rank[bank][name] for rank in ranks])
            assert float((found - value).norm() / value.norm()) <= BOUND, (bank, name)
            if name in ("up", "down"):
                assert [number for number, one in enumerate(found) if not one.any()] == IDLE
