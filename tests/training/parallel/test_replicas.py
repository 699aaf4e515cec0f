"""Replicated tensors that differ are named with their rank; a norm whose gradient was not summed is caught."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn

from megacpp_validate.native.norms import RMSNorm
from megacpp_validate.training.parallel.replicas import (
    ReplicaDiverged,
    check_replicas,
    digest_tensor,
    mark_split,
    reduce_split_gradients,
    split_parameters,
)
from tests.training.parallel.gloo_ranks import on_ranks

pytestmark = pytest.mark.thorough

LENGTH, HIDDEN, HEADS, WIDTH = 8, 6, 4, 4


class Norms(nn.Module):
    """A norm of positions, a norm of the queries of each head, and what no rank has a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query_norm = RMSNorm(HIDDEN, dtype=torch.float64), RMSNorm(WIDTH, dtype=torch.float64)
        self.head = nn.Linear(HIDDEN, 2, dtype=torch.float64)
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        mark_split([self.norm.weight, self.query_norm.weight, self.unused])


def make_inputs() -> tuple[Any, Any, Any, Any]:
    """Rows [T, hidden] and queries [T, H, D], each with the gradient of its normed form."""
    drawn = torch.Generator().manual_seed(3)
    shapes = ((LENGTH, HIDDEN), (LENGTH, HIDDEN), (LENGTH, HEADS, WIDTH), (LENGTH, HEADS, WIDTH))
    return tuple(torch.randn(*shape, generator=drawn, dtype=torch.float64) for shape in shapes)  # type: ignore[return-value]


def gradients_of(model: Norms, positions: slice, heads: slice) -> None:
    rows, at_rows, queries, at_queries = make_inputs()
    (model.norm(rows[positions]) * at_rows[positions]).sum().backward()
    (model.query_norm(queries[:, heads]) * at_queries[:, heads]).sum().backward()


def everything_on_a_rank() -> dict[str, Any]:
    world, rank = distributed.get_world_size(), distributed.get_rank()
    torch.manual_seed(0)
    model = Norms()
    seen: dict[str, Any] = {"same": check_replicas(model.named_parameters()), "none": check_replicas([])}
    positions = slice(rank * LENGTH // world, (rank + 1) * LENGTH // world)
    gradients_of(model, positions, slice(rank * HEADS // world, (rank + 1) * HEADS // world))
    marked = split_parameters(model)
    seen["marked"] = tuple(marked)

    def gradients() -> list[tuple[str, Any]]:
        return [(name, parameter.grad) for name, parameter in model.named_parameters()]

    seen["not summed"] = diverged(gradients(), what="gradient")
    omitted = marked.pop("query_norm.weight")  # the planted fault
    reduce_split_gradients(marked)
    seen["one omitted"] = diverged(gradients(), what="gradient")
    reduce_split_gradients({"query_norm.weight": omitted})
    seen["summed"] = check_replicas(gradients(), what="gradient")
    seen["gradients"] = dict(gradients())
    seen["drift"] = plant(model, lambda weight: weight.view(-1)[1:2].mul_(1 + 2.0**-50), world - 1)
    seen["zero"] = plant(model, lambda weight: weight.view(-1)[:1].copy_(torch.tensor([-0.0])), 0)
    seen["names"] = diverged([(f"{rank}.weight", model.head.weight)])
    seen["shapes"] = diverged([("weight", torch.zeros(rank + 1))])
    pairs = [distributed.new_group([first, first + 1]) for first in range(0, world, 2)]
    seen["in pairs"] = diverged([("pair", torch.tensor([float(rank)]))], group=pairs[rank // 2])
    return seen


def diverged(named: Any, **more: Any) -> tuple[str, str, tuple[int, ...], tuple[str, ...]]:
    with pytest.raises(ReplicaDiverged) as caught:
        check_replicas(named, **more)
    return str(caught.value), caught.value.name, caught.value.ranks, caught.value.names


def plant(model: Norms, fault: Any, at: int) -> Any:
    """One element of the head is another on one rank."""
    kept = model.head.weight.detach().clone()
    kept.view(-1)[0] = 0.0
    with torch.no_grad():
        model.head.weight.copy_(kept)
        if distributed.get_rank() == at:
            fault(model.head.weight)
    try:
        return diverged(model.named_parameters())
    finally:
        with torch.no_grad():
            model.head.weight.copy_(kept)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return on_ranks(request.param, everything_on_a_rank)


def test_what_is_the_same_passes(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert (rank["same"], rank["none"], rank["summed"]) == (5, 0, 5)
        assert rank["marked"] == ("unused", "norm.weight", "query_norm.weight")


def test_summed_gradients_are_those_of_one_rank(ranks: list[dict[str, Any]]) -> None:
    """The same terms in another order: off by 2 gamma of their absolute sum (Higham 2002, 4.2), of up to 32 terms."""
    whole = Norms()
    gradients_of(whole, slice(None), slice(None))
    rows, at_rows, queries, at_queries = make_inputs()
    size = {
        "norm.weight": (at_rows * RMSNorm(HIDDEN, dtype=torch.float64)(rows)).abs().sum(0),
        "query_norm.weight": (at_queries * RMSNorm(WIDTH, dtype=torch.float64)(queries)).abs().sum((0, 1)),
    }
    for rank in ranks:
        for name, absolute in size.items():
            wanted = whole.get_parameter(name).grad
            assert bool(((rank["gradients"][name] - wanted).abs() <= 2 * 40 * 2.0**-53 * absolute.detach()).all()), name
        assert torch.equal(rank["gradients"]["unused"], torch.zeros(3, dtype=torch.bfloat16))
        assert rank["gradients"]["head.weight"] is None


def test_an_omitted_norm_is_named(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        said, name, _, names = rank["one omitted"]
        assert (name, names) == ("query_norm.weight", ("query_norm.weight",))
        assert "whose gradient was not summed over its group" in said
        assert rank["not summed"][3] == ("norm.weight", "query_norm.weight")
        assert "the first of 2" in rank["not summed"][0]


def test_one_bit_on_one_rank_is_named(ranks: list[dict[str, Any]]) -> None:
    world = len(ranks)
    for rank in ranks:
        assert rank["drift"][1:] == ("head.weight", (world - 1,), ("head.weight",))
        # Of two ranks that differ nobody knows which is right: the lowest is taken to be.
        assert rank["zero"][1:3] == ("head.weight", (0,) if world > 2 else (1,))
        assert "has other bits than the rest of [" in rank["zero"][0]


def test_other_lists_are_refused_before_a_rank_waits_for_one(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["names"][1] == "the list of parameters"
        assert rank["shapes"][1] == "the list of parameters"


def test_ranks_are_named_by_their_number_in_the_world(ranks: list[dict[str, Any]]) -> None:
    assert [rank["in pairs"][2] for rank in ranks] == [(number // 2 * 2 + 1,) for number in range(len(ranks))]


def test_a_digest_covers_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megacpp_validate.training.parallel.replicas._PIECE", 4)
    tensor = torch.arange(10, dtype=torch.bfloat16).view(2, 5)
    known = digest_tensor(tensor)
    for place in range(10):
        other = tensor.clone()
        other.view(-1)[place] += 1
        assert digest_tensor(other) != known
    assert digest_tensor(torch.cat([tensor.view(-1)[4:8], tensor.view(-1)[:4], tensor.view(-1)[8:]])) != known
    assert digest_tensor(tensor.t().contiguous().t()) == known  # however it lies
    assert digest_tensor(None) != digest_tensor(torch.zeros(0))
