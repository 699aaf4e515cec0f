"""The jagged path on 2 and 4 real ranks is that of one, and the path "bridge" over ranks; planted faults are seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from megacpp_validate.bridge.jagged_experts import jagged_moe
from megacpp_validate.native.grouped_gemm import grouped_gemm
from megacpp_validate.native.mlp import gated_activation
from megacpp_validate.native.permute import permute, unpermute
from megacpp_validate.training.parallel import exchange as exchanges
from megacpp_validate.training.parallel.checks import TokenCounts, TokensNotConserved, check_conservation
from megacpp_validate.training.parallel.exchange import ExpertExchange, JaggedExchange
from tests.training.parallel.gloo_ranks import on_ranks

pytestmark = pytest.mark.thorough

HIDDEN, WIDTH, EXPERTS, TOP_K = 16, 8, 8, 3  # on 4 ranks a token has more experts than a rank
# Uneven, and one rank without tokens; experts 1 to 3 are idle: on 4 ranks rank 1 holds 2 and 3, and gets no row.
TOKENS = {2: (9, 4), 4: (5, 0, 7, 3)}
IDLE = (1, 2, 3)
LEAVES = ("tokens", "weights", "up", "down")
# Relative, in the norm. fp64: a number passes sums of at most 16 terms, three products deep and back, then k rows and
# up to 15 tokens, each term off by 2^-53: below (6 x 16 + 3 + 15) x 2^-53 if all add up; doubled for the second of the
# two that are compared, and again for the division by norms that cancelled. bf16: at most eight roundings of 2^-8 on
# the way of a gradient (up, inner, down, and back of_out, of_inner, of_up, of_rows, sum).
BOUNDS = {torch.float64: 4 * 114 * 2.0**-53, torch.bfloat16: 8 * 2.0**-8}


def make_data(tokens: int, dtype: Any = torch.float64) -> SimpleNamespace:
    drawn = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=drawn, dtype=torch.float64)

    logits = draw(tokens, EXPERTS)
    logits[:, list(IDLE)] = float("-inf")
    weights, chosen = logits.softmax(dim=-1).topk(TOP_K, dim=-1)
    return SimpleNamespace(
        tokens=draw(tokens, HIDDEN).to(dtype), chosen=chosen,
        weights=weights.to(torch.promote_types(dtype, torch.float32)),
        up=(draw(EXPERTS, 2 * WIDTH, HIDDEN) * HIDDEN**-0.5).to(dtype),
        down=(draw(EXPERTS, HIDDEN, WIDTH) * WIDTH**-0.5).to(dtype), gradient=draw(tokens, HIDDEN).to(dtype),
    )  # fmt: skip


def part_of(data: Any, world: int, rank: int) -> SimpleNamespace:
    """A rank's tokens and experts."""
    first = sum(TOKENS[world][:rank])
    tokens = slice(first, first + TOKENS[world][rank])
    experts = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    return SimpleNamespace(
        **{name: getattr(data, name)[tokens] for name in ("tokens", "chosen", "weights", "gradient")},
        up=data.up[experts], down=data.down[experts],
    )  # fmt: skip


def differentiate(layer: Any, data: Any) -> dict[str, Any]:
    given = [getattr(data, name).clone().requires_grad_() for name in LEAVES]
    tokens, weights, up, down = given
    out = layer(tokens, data.chosen, weights, up, down)
    return dict(zip(("out", *LEAVES), (out.detach(), *torch.autograd.grad(out, given, data.gradient)), strict=True))


def by_the_bridge(tokens: Any, chosen: Any, weights: Any, up: Any, down: Any) -> Any:
    """The path "bridge" over ranks, of its native parts."""
    routed = torch.zeros(len(tokens), EXPERTS, dtype=torch.bool).scatter(1, chosen, True)
    probs = torch.zeros(len(tokens), EXPERTS, dtype=weights.dtype).scatter(1, chosen, weights)
    rows, scale, ids = permute(tokens, probs, routed)

    def bank(rows: Any, counts: Any) -> Any:
        return grouped_gemm(gated_activation(grouped_gemm(rows, up, list(counts)), "swiglu"), down, list(counts))

    out = ExpertExchange(EXPERTS, audit=True).run(rows, routed.sum(0).tolist(), bank)
    return unpermute(out, ids, num_tokens=len(tokens), row_probs=scale)


def everything_on_a_rank() -> dict[str, Any]:
    world, rank = distributed.get_world_size(), distributed.get_rank()
    seen: dict[str, Any] = {}
    for dtype in BOUNDS:
        mine = part_of(make_data(sum(TOKENS[world]), dtype), world, rank)
        exchange = JaggedExchange(EXPERTS, audit=dtype == torch.float64)
        seen[str(dtype)] = differentiate(exchange.run, mine)
    mine = part_of(make_data(sum(TOKENS[world])), world, rank)
    seen["bridge"] = differentiate(by_the_bridge, mine)
    routed = torch.zeros(len(mine.chosen), EXPERTS, dtype=torch.bool).scatter(1, mine.chosen, True)
    assert exchange.counts is not None
    check_conservation(exchange.counts, routed)
    seen["counts"] = exchange.counts
    with pytest.raises(TokensNotConserved) as caught:
        check_conservation(_of_the_next_rank(exchange.counts, rank), routed)
    seen["counts of the wrong rank"] = caught.value.where
    for stage in ("dispatch", "combine"):
        seen[f"swapped in {stage}"] = _swapped(mine, stage, at_fault=rank == world - 1)
    return seen


REAL_START = exchanges.start_rows


def _of_the_next_rank(counts: TokenCounts, rank: int) -> TokenCounts:
    """Rank 0 takes what it got from the last rank for what came from itself."""
    return TokenCounts(counts.sent, (counts.received[-1], *counts.received[:-1])) if rank == 0 else counts


def _swapped(mine: Any, stage: str, *, at_fault: bool) -> dict[str, Any]:
    calls: list[int] = []

    def spoiled(rows: Any, *rest: Any) -> Any:
        calls.append(1)
        if at_fault and len(calls) == (1 if stage == "dispatch" else 2):
            rows = rows.flip(0)
        return REAL_START(rows, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchanges, "start_rows", spoiled)
        with pytest.raises(TokensNotConserved, match=stage) as caught:
            JaggedExchange(EXPERTS, audit=True).run(mine.tokens, mine.chosen, mine.weights, mine.up, mine.down)
    return caught.value.where


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return on_ranks(request.param, everything_on_a_rank)


def far(ranks: list[dict[str, Any]], kind: str, wanted: dict[str, Any]) -> float:
    """Relative, of the tensor that is off the most: tokens and experts of all ranks side by side."""
    found = {name: torch.cat([rank[kind][name] for rank in ranks]).double() for name in wanted}
    return max(float((found[name] - value).norm() / value.norm()) for name, value in wanted.items())


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_ranks_compute_what_one_does(ranks: list[dict[str, Any]], dtype: Any) -> None:
    data = make_data(sum(TOKENS[len(ranks)]), dtype)
    exact = SimpleNamespace(
        **{name: one.double() if one.is_floating_point() else one for name, one in vars(data).items()}
    )
    wanted = differentiate(jagged_moe, exact)
    assert far(ranks, str(dtype), wanted) <= BOUNDS[dtype]
    if dtype == torch.float64:
        assert far(ranks, "bridge", wanted) <= BOUNDS[dtype]


def test_idle_experts_and_ranks_without_rows(ranks: list[dict[str, Any]]) -> None:
    world = len(ranks)
    for name in ("up", "down"):
        whole = torch.cat([rank[str(torch.float64)][name] for rank in ranks])
        assert [not bool(one.any()) for one in whole] == [expert in IDLE for expert in range(EXPERTS)]
    received = [sum(map(sum, rank["counts"].received)) for rank in ranks]
    assert received.count(0) == (1 if world == 4 else 0)
    assert [sum(rank["counts"].sent) for rank in ranks] == [TOP_K * count for count in TOKENS[world]]


def test_wrong_counts_and_swapped_rows_are_named(ranks: list[dict[str, Any]]) -> None:
    last = len(ranks) - 1
    for rank in ranks:
        assert rank["counts of the wrong rank"] == ranks[0]["counts of the wrong rank"]
        assert rank["counts of the wrong rank"]["source"] in (0, last)
        for stage in ("dispatch", "combine"):
            where = rank[f"swapped in {stage}"]
            assert (where["stage"], where["source"]) == (stage, last)
            assert where["experts"]
