"""Experts on 2 and 4 real ranks compute what one rank does, by both banks; planted faults are seen."""

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
from megacpp_validate.training.expert_layer import run_jagged
from megacpp_validate.training.parallel import exchange as exchanges
from megacpp_validate.training.parallel.checks import TokensNotConserved, check_routed
from megacpp_validate.training.parallel.exchange import ExpertExchange
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


def run_loop(rows: Any, counts: Any, up: Any, down: Any) -> Any:
    return grouped_gemm(gated_activation(grouped_gemm(rows, up, list(counts)), "swiglu"), down, list(counts))


BANKS = {"loop": run_loop, "jagged": run_jagged}


def over_ranks(bank: Any, *, audit: bool = True) -> Any:
    def layer(tokens: Any, chosen: Any, weights: Any, up: Any, down: Any) -> Any:
        routed = torch.zeros(len(tokens), EXPERTS, dtype=torch.bool).scatter(1, chosen, True)
        probs = torch.zeros(len(tokens), EXPERTS, dtype=weights.dtype).scatter(1, chosen, weights)
        rows, scale, ids = permute(tokens, probs, routed)
        exchange = ExpertExchange(EXPERTS, audit=audit)
        out = exchange.run(rows, routed.sum(0).tolist(), lambda rows, counts: bank(rows, counts, up, down))
        return unpermute(out, ids, num_tokens=len(tokens), row_probs=scale)

    return layer


def everything_on_a_rank() -> dict[str, Any]:
    world, rank = distributed.get_world_size(), distributed.get_rank()
    seen: dict[str, Any] = {}
    for dtype in BOUNDS:
        mine = part_of(make_data(sum(TOKENS[world]), dtype), world, rank)
        for name, bank in BANKS.items():
            seen[f"{name} {dtype}"] = differentiate(over_ranks(bank, audit=dtype == torch.float64), mine)
    mine = part_of(make_data(sum(TOKENS[world])), world, rank)
    routed = torch.zeros(len(mine.chosen), EXPERTS, dtype=torch.bool).scatter(1, mine.chosen, True)
    sent = routed.sum(0).tolist()
    check_routed(sent, routed)
    with pytest.raises(TokensNotConserved) as caught:
        check_routed([*sent[:-1], sent[-1] + (rank == 1)], routed)
    seen["wrong counts"] = caught.value.where
    for stage in ("dispatch", "combine"):
        seen[f"swapped in {stage}"] = _swapped(mine, stage, at_fault=rank == world - 1)
    return seen


REAL = exchanges.exchange_rows


def _swapped(mine: Any, stage: str, *, at_fault: bool) -> dict[str, Any]:
    calls: list[int] = []

    def spoiled(rows: Any, *rest: Any) -> Any:
        calls.append(1)
        if at_fault and len(calls) == (1 if stage == "dispatch" else 2):
            rows = rows.flip(0)
        return REAL(rows, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchanges, "exchange_rows", spoiled)
        with pytest.raises(TokensNotConserved, match=stage) as caught:
            differentiate(over_ranks(run_loop), mine)
    return caught.value.where


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return on_ranks(request.param, everything_on_a_rank)


def far(ranks: list[dict[str, Any]], kind: str, wanted: dict[str, Any]) -> float:
    """Relative, of the tensor that is off the most: tokens and experts of all ranks side by side."""
    found = {name: torch.cat([rank[kind][name] for rank in ranks]).double() for name in wanted}
    return max(float((found[name] - value).norm() / value.norm()) for name, value in wanted.items())


@pytest.mark.parametrize("bank", BANKS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_ranks_compute_what_one_does(ranks: list[dict[str, Any]], dtype: Any, bank: str) -> None:
    data = make_data(sum(TOKENS[len(ranks)]), dtype)
    exact = SimpleNamespace(
        **{name: one.double() if one.is_floating_point() else one for name, one in vars(data).items()}
    )
    assert far(ranks, f"{bank} {dtype}", differentiate(jagged_moe, exact)) <= BOUNDS[dtype]
    for name in ("up", "down"):
        whole = torch.cat([rank[f"{bank} {dtype}"][name] for rank in ranks])
        assert [not bool(one.any()) for one in whole] == [expert in IDLE for expert in range(EXPERTS)]


def test_wrong_counts_and_swapped_rows_are_named(ranks: list[dict[str, Any]]) -> None:
    last = len(ranks) - 1
    for rank in ranks:
        assert rank["wrong counts"] == {"experts": [EXPERTS - 1], "source": 1}
        for stage in ("dispatch", "combine"):
            where = rank[f"swapped in {stage}"]
            assert (where["stage"], where["source"]) == (stage, last)
            assert where["experts"]
