"""Values that are not finite and replicas that differ are found, with module, tensor and rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn

from megacpp_validate.training.parallel.checks import (
    FiniteWatch,
    ReplicaDiverged,
    check_replicas,
    digest_chunks,
    digest_tensor,
    share_of_balance_loss,
)
from tests.training.parallel.gloo_ranks import on_ranks


class Divide(nn.Module):
    """1 / x: infinite forward for 0, and its gradient too."""

    def forward(self, x: Any) -> Any:
        return {"out": 1 / x}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.divide, self.last = nn.Linear(2, 2), Divide(), nn.Linear(2, 1)

    def forward(self, x: Any) -> Any:
        return self.last(self.divide(self.first(x))["out"].clamp(max=10))


def spoil_weight(net: Net) -> None:
    net.last.weight.data[0, 0] = float("nan")


def spoil_output(net: Net) -> None:
    net.first.weight.data.zero_()
    net.first.bias.data.zero_()


def spoil_gradient(net: Net) -> None:
    def spoil(module: Any, given: Any, out: Any) -> None:
        out.register_hook(lambda gradient: gradient * float("inf"))

    net.first.register_forward_hook(spoil, prepend=True)


@pytest.mark.parametrize(
    ("spoil", "module", "tensor", "forward"),
    [
        (spoil_weight, "last", "parameter weight", False),
        (spoil_output, "divide", "output out", False),
        (spoil_gradient, "divide", "gradient of the input", True),
    ],
)
def test_the_first_value_that_is_not_finite_is_named(spoil: Any, module: str, tensor: str, *, forward: bool) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(3, 2)
    watch = FiniteWatch(net)
    net(x)
    assert watch.is_finite(torch.ones(()))
    assert not watch.is_finite(torch.tensor(float("nan")))
    spoil(net)
    net(x)
    assert watch.is_finite() == forward
    found = watch.find(lambda: net(x).sum().backward())
    assert found is not None
    assert found[1:] == (0, module, tensor)
    assert all(parameter.grad is None for parameter in net.parameters())


def test_digests_see_single_elements_order_and_places() -> None:
    rows = torch.randn(6, 3, dtype=torch.bfloat16)
    digest = digest_chunks(rows, (2, 0, 4))
    assert digest[1] == 0
    for change in (rows.flip(0), rows * 1.01, rows.index_fill(0, torch.tensor([5]), 0.0)):
        assert not torch.equal(digest_chunks(change, (2, 0, 4)), digest)
    swapped = rows[[1, 0, 2, 3, 4, 5]]
    assert (digest_chunks(swapped, (2, 0, 4)) == digest).tolist() == [False, True, True]
    assert digest_tensor(torch.zeros(0)) == 0


def on_a_rank() -> dict[str, Any]:
    rank, seen = distributed.get_rank(), {}
    named = {"first": torch.ones(3), "second": torch.arange(4.0)}
    assert check_replicas(named.items()) == 2
    if rank == 2:
        named["second"][1] = 7
    with pytest.raises(ReplicaDiverged) as caught:
        check_replicas(named.items(), what="expert")
    seen["tensor"] = caught.value.where
    if rank == 1:
        named["third"] = torch.ones(1)
    with pytest.raises(ReplicaDiverged) as caught:
        check_replicas(named.items())
    seen["list"] = caught.value.where
    net = Net()
    net.load_state_dict({name: torch.ones_like(one) for name, one in net.state_dict().items()})
    watch = FiniteWatch(net)
    (spoil_weight if rank == 1 else spoil_gradient if rank == 2 else lambda _: None)(net)
    net(torch.ones(1, 2))
    assert not watch.is_finite()  # on one rank, so on all
    seen["found"] = watch.find(lambda: net(torch.ones(1, 2)).sum().backward())
    probs, routed = torch.rand(3 + rank, 4).double(), torch.rand(3 + rank, 4) < 0.5
    seen["loss"] = probs, routed, share_of_balance_loss(probs, routed)
    return seen


@pytest.mark.thorough
def test_all_ranks_name_the_same_rank() -> None:
    ranks = on_ranks(3, on_a_rank)
    for seen in ranks:
        assert seen["tensor"] == {"tensor": "second", "kind": "expert", "ranks": [2]}
        assert seen["list"] == {"tensor": "list", "kind": "parameter", "ranks": [1]}
        assert seen["found"][1:] == (1, "last", "parameter weight")
    probs, routed = (torch.cat([seen["loss"][place] for seen in ranks]) for place in (0, 1))
    wanted = 4 * (routed.sum(0).double() / routed.sum() * probs.mean(0)).sum()
    assert sum(seen["loss"][2] for seen in ranks).item() == pytest.approx(wanted.item(), rel=1e-12)
