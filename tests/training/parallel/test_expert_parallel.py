"""Experts shared out over 2 and 4 real ranks compute what one rank does; lost, swapped and changed rows are named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from megacpp_validate.native.permute import permute
from megacpp_validate.native.router import load_balancing_loss
from megacpp_validate.training.parallel import expert_parallel
from megacpp_validate.training.parallel.expert_parallel import ExpertExchange, WrongExchange
from megacpp_validate.training.parallel.token_counts import (
    TokenCounts,
    TokensNotConserved,
    check_conservation,
    digest_chunks,
    share_of_balance_loss,
)
from tests.training.parallel.expert_layer_run import (
    EXPERTS,
    HIDDEN,
    IDLE,
    NAMES,
    TOKENS,
    TOP_K,
    WIDTH,
    make_data,
    part_of,
    run_layer,
)
from tests.training.parallel.gloo_ranks import on_ranks

pytestmark = pytest.mark.thorough


def everything_on_a_rank() -> dict[str, Any]:
    """All that is asked of a rank, in one start of it."""
    world, rank = distributed.get_world_size(), distributed.get_rank()
    seen: dict[str, Any] = {}
    for whole in (True, False):
        mine = part_of(make_data(sum(TOKENS[world]), whole=whole), world, rank)
        exchange = ExpertExchange(EXPERTS, audit=whole)
        seen["whole" if whole else "normal"] = run_layer(mine, exchange)
        assert exchange.counts is not None
        seen["counts"] = exchange.counts
        seen["per_expert"] = check_conservation(exchange.counts, mine.chosen)
    seen["refused"] = _refusal(lambda: ExpertExchange(EXPERTS + 1))
    seen["too_few"] = _refusal(lambda: ExpertExchange(EXPERTS).dispatch(torch.zeros(1, 2), [1]))
    seen["frozen"] = _gradient_beside_frozen_rows(rank)
    seen["lost"] = _lost_row(mine, exchange.counts, rank)
    seen["other map"] = _other_map(mine, exchange.counts, rank)
    for name, fault in (("changed", _zero_the_first), ("swapped", _swap_ends)):
        for stage in ("dispatch", "combine"):
            seen[f"{name} in {stage}"] = _planted(mine, fault, stage)
    seen["balance"] = _balance(world, rank)
    return seen


def _refusal(call: Any) -> str:
    with pytest.raises(WrongExchange) as caught:
        call()
    return str(caught.value)


def _swap_ends(rows: Any) -> Any:
    order = list(range(len(rows)))
    order[:1], order[-1:] = order[-1:], order[:1]
    return rows[order]


def _gradient_beside_frozen_rows(rank: int) -> Any:
    """Only rank 0's rows need a gradient; every rank runs the backward all the same."""
    rows = torch.ones(EXPERTS, 2).requires_grad_(rank == 0)
    out = ExpertExchange(EXPERTS).run(rows, [1] * EXPERTS, lambda rows, _: rows * 2)
    out.sum().backward()
    return rows.grad


def _lost_row(mine: Any, counts: TokenCounts, rank: int) -> tuple[str, ...]:
    """Rank 0's dispatch forgot one row that its router had given expert 0."""
    if rank == 0:
        counts = TokenCounts((counts.sent[0] - 1, *counts.sent[1:]), counts.received)
    with pytest.raises(TokensNotConserved, match="expert 0") as caught:
        check_conservation(counts, mine.chosen)
    return caught.value.faults


def _other_map(mine: Any, counts: TokenCounts, rank: int) -> tuple[str, ...]:
    """Rank 0's router wanted expert 1 for its first token too; what was sent did arrive."""
    chosen = mine.chosen.clone()
    chosen[:1, 1] |= rank == 0
    with pytest.raises(TokensNotConserved, match="another routing map") as caught:
        check_conservation(counts, chosen)
    return caught.value.faults


def _zero_the_first(rows: Any) -> Any:
    return rows.index_fill(0, torch.tensor([0]), 0.0) if len(rows) else rows


def _planted(mine: Any, fault: Any, stage: str) -> tuple[str, ...]:
    """What an audit says where the last rank with rows spoils what it sends; every rank finishes the exchange."""
    real, world, calls = expert_parallel._exchange, distributed.get_world_size(), []

    def spoiled(rows: Any, *rest: Any) -> Any:
        calls.append(stage)
        at_fault = distributed.get_rank() == world - 1 and len(calls) == (1 if stage == "dispatch" else 2)
        return real(fault(rows) if at_fault else rows, *rest)

    rows, _, _ = permute(mine.tokens, None, mine.chosen)
    expert_parallel._exchange = spoiled
    try:
        with pytest.raises(TokensNotConserved, match=stage) as caught:
            ExpertExchange(EXPERTS, audit=True).run(rows, mine.chosen.sum(0).tolist(), lambda rows, _: rows + 1)
    finally:
        expert_parallel._exchange = real
    return caught.value.faults


def _balance(world: int, rank: int) -> tuple[Any, Any]:
    data = make_data(sum(TOKENS[world]), whole=False)
    mine = part_of(data, world, rank)
    logits = (mine.tokens @ mine.gate.t()).requires_grad_()
    loss = share_of_balance_loss(logits.softmax(-1), mine.chosen)
    loss.backward()
    return loss.detach(), logits.grad


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return on_ranks(request.param, everything_on_a_rank)


def gathered(ranks: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Tokens and experts side by side; the gate, which every rank has, summed."""
    seen = [rank[kind] for rank in ranks]
    joined = {name: torch.cat([one[name] for one in seen]) for name in ("out", "tokens", "up", "down")}
    return {**joined, "gate": torch.stack([one["gate"] for one in seen]).sum(0)}


def test_sums_that_are_exact_are_the_same_bit_by_bit(ranks: list[dict[str, Any]]) -> None:
    wanted = run_layer(make_data(sum(TOKENS[len(ranks)]), whole=True))
    found = gathered(ranks, "whole")
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
        assert bool(value.abs().sum() > 0), name


def test_others_differ_by_their_order_alone(ranks: list[dict[str, Any]]) -> None:
    """Each number is a sum of products along paths; a path meets sums of `terms` numbers in all. In either order the
    error of such a sum is at most gamma_terms times the sum of the absolute values (Higham 2002, 3.1 and 4.2), which
    the same layer gives of absolute values, without its ReLU."""
    data = make_data(sum(TOKENS[len(ranks)]), whole=False)
    wanted = run_layer(data)
    size = run_layer(
        SimpleNamespace(chosen=data.chosen, **{name: getattr(data, name).abs() for name in NAMES}), absolute=True
    )
    found = gathered(ranks, "normal")
    terms = 2 * HIDDEN + WIDTH + TOP_K + len(data.tokens) + 4  # products of the path itself
    for name, value in wanted.items():
        bound = 2 * terms * 2.0**-53 / (1 - terms * 2.0**-53) * size[name]
        assert bool(((found[name] - value).abs() <= bound).all()), name


def test_counts_are_those_of_the_router(ranks: list[dict[str, Any]]) -> None:
    world = len(ranks)
    data = make_data(sum(TOKENS[world]), whole=False)
    chosen = data.chosen
    for rank, seen in enumerate(ranks):
        assert seen["per_expert"] == tuple(chosen.sum(0).tolist())
        assert seen["counts"].sent == tuple(part_of(data, world, rank).chosen.sum(0).tolist())
        assert sum(map(sum, seen["counts"].received)) == int(
            chosen[:, rank * EXPERTS // world : (rank + 1) * EXPERTS // world].sum()
        )
    idle = [rank for rank in ranks if not sum(map(sum, rank["counts"].received))]
    assert len(idle) == (1 if world == 4 else 0)  # the rank of experts 2 and 3
    assert [rank["counts"].sent == (0,) * EXPERTS for rank in ranks] == [n == 0 for n in TOKENS[world]]


def test_experts_without_tokens_get_a_gradient_of_zeros(ranks: list[dict[str, Any]]) -> None:
    for name in ("up", "down"):
        whole = gathered(ranks, "normal")[name]
        assert [bool((whole[expert] == 0).all()) for expert in range(EXPERTS)] == [e in IDLE for e in range(EXPERTS)]


def test_a_rank_whose_rows_need_no_gradient_does_not_hang_the_others(ranks: list[dict[str, Any]]) -> None:
    assert torch.equal(ranks[0]["frozen"], torch.full((EXPERTS, 2), 2.0))
    assert all(rank["frozen"] is None for rank in ranks[1:])


def test_what_cannot_be_exchanged_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert f"9 experts cannot be shared out over {len(ranks)} ranks" in rank["refused"]
        assert "1 numbers of rows for 8 experts" in rank["too_few"]


def test_a_lost_row_is_named_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    faults = {rank["lost"] for rank in ranks}
    assert len(faults) == 1
    (only,) = faults.pop()
    assert only.startswith("expert 0: the router of rank 0 gave it")
    assert ", rank 0 sent" in only


def test_a_dispatch_by_another_map_is_named(ranks: list[dict[str, Any]]) -> None:
    fault = "expert 1: the router of rank 0 gave it 1 row(s), rank 0 sent 0, rank 0 received 0"
    assert {rank["other map"] for rank in ranks} == {(fault,)}


@pytest.mark.parametrize("stage", ["dispatch", "combine"])
@pytest.mark.parametrize("plant", ["changed", "swapped"])
def test_rows_that_are_not_those_that_were_sent_are_named(ranks: list[dict[str, Any]], plant: str, stage: str) -> None:
    (said,) = {rank[f"{plant} in {stage}"] for rank in ranks}  # the same on every rank
    assert said
    assert all(f"from rank {len(ranks) - 1} to" in fault for fault in said)


def test_parts_of_the_balance_loss_make_the_whole(ranks: list[dict[str, Any]]) -> None:
    data = make_data(sum(TOKENS[len(ranks)]), whole=False)
    logits = (data.tokens @ data.gate.t()).requires_grad_()
    loss = load_balancing_loss(logits.softmax(-1), data.chosen)
    loss.backward()
    found = torch.stack([rank["balance"][0] for rank in ranks]).sum()
    # All terms are positive: a relative error of at most gamma of the number of roundings, here below 64 either way.
    assert abs(float(found / loss.detach()) - 1) <= 2 * 64 * 2.0**-53
    gradient = torch.cat([rank["balance"][1] for rank in ranks])
    # d loss / d logit = p (s - sum p s): differences of numbers up to E / T.
    assert bool(((gradient - logits.grad).abs() <= 2 * 64 * 2.0**-53 * EXPERTS / len(data.tokens)).all())


def test_a_digest_sees_each_kind_of_change() -> None:
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    sizes = (2, 0, 3)
    known = digest_chunks(rows, sizes).values
    assert known[1] == 0
    for fault in (rows[[1, 0, 2, 3, 4]], rows.flip(0), rows * 2, torch.cat([rows[:4], rows[3:4]]), -rows):
        assert (digest_chunks(fault, sizes).values != known).tolist() != [False] * 3
    assert torch.equal(digest_chunks(rows.clone(), sizes).values, known)
    assert not torch.equal(digest_chunks(rows, (3, 0, 2)).values, known)
    zeros = torch.zeros(2, 3)
    assert digest_chunks(zeros, (2,)).values != digest_chunks(zeros[:1], (1,)).values
