"""The plan of the linear walk where memory, modules or holders are shared, and where a tree is deep or wide."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")
from torch import nn  # noqa: E402

from megacpp_validate.bridge.linear_walker import (  # noqa: E402
    plan_walk,
    swap_linears,
)
from tests.bridge.linear_trees import codes, holder  # noqa: E402

pytestmark = pytest.mark.usefixtures("te_double")


def linear(inputs: int = 16, outputs: int = 16, *, device: str = "cpu") -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, device=device)


def on(memory: Any) -> nn.Linear:
    """A layer whose weight is a view of some memory."""
    made = linear(*reversed(memory.shape))
    made.weight = nn.Parameter(memory)
    return made


def with_router() -> nn.Module:
    router = linear()
    return holder("Tree", mlp=holder("Mlp", fc1=on(router.weight.detach())), moe=holder("MoE", router=router))


def with_head() -> nn.Module:
    first, head = linear(), linear()
    head.weight = first.weight
    return holder("Tree", fc1=first, lm_head=head)


def with_hooked() -> nn.Module:
    first, second = linear(), linear()
    second.weight = first.weight
    second.register_forward_hook(lambda *_: None)
    return holder("Tree", fc1=first, fc2=second)


KEPT = {
    "router": (with_router, {"mlp.fc1"}),
    "unlisted head": (with_head, {"fc1"}),
    "hooked twin": (with_hooked, {"fc1"}),
}


@pytest.mark.parametrize(("tree", "names"), KEPT.values(), ids=KEPT)
def test_what_shares_a_weight_with_a_kept_layer_is_kept(tree: Any, names: set[str]) -> None:
    made = tree()
    plan = plan_walk(made)
    assert {name for name, code in codes(plan).items() if code == "tied-kept"} == names
    assert swap_linears(made).plan.swapped == ()


@pytest.mark.parametrize("rows", [slice(None), slice(16)])
def test_a_layer_on_the_first_rows_of_an_embedding_is_kept(rows: slice) -> None:
    embedding = nn.Embedding(32, 16)
    plan = plan_walk(holder("Tree", embed=embedding, fc1=on(embedding.weight.detach()[rows])))
    assert codes(plan) == {"fc1": "tied-embedding"}
    assert "embed.weight" in plan["fc1"].reason


def test_a_bias_ties_nothing_and_memory_given_back_ties_nothing() -> None:
    first, head = nn.Linear(16, 16), nn.Linear(16, 16)
    head.bias = first.bias
    assert plan_walk(holder("Tree", fc1=first, head=head)).swapped == ("fc1",)
    tree = holder("Tree", fc1=linear(), head=linear())
    for layer in (tree.fc1, tree.head):  # as a sharded model is between two steps: sizes stay, memory is none
        layer.weight.untyped_storage().resize_(0)
    assert plan_walk(tree).swapped == ("fc1",)


def test_a_class_on_one_way_does_not_name_the_layer_on_another() -> None:
    shared = linear()
    sequence = nn.Sequential(shared)
    tree = holder("Tree", a=sequence, b=holder("B", c=holder("C", x=shared)))
    plan = plan_walk(tree, include=(nn.Sequential,))
    assert codes(plan) == {"a.0": "not-listed", "b.c.x": "not-listed"}
    assert "as b.c.x" in plan["a.0"].reason
    assert plan_walk(tree, include=(nn.Sequential, "c.x")).swapped == ("a.0", "b.c.x")
