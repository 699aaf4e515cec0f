"""The plan of the linear walk where memory, modules or holders are shared."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")
from torch import nn  # noqa: E402

from megacpp_validate.bridge.linear_walker import plan_walk, swap_linears  # noqa: E402
from tests.bridge.linear_trees import codes, holder  # noqa: E402

pytestmark = pytest.mark.usefixtures("te_double")


def linear(weight: Any = None) -> nn.Linear:
    """A layer of its own, or on a given weight."""
    if weight is None:
        return nn.Linear(16, 16, bias=False)
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
    return made


def embedding_and(change: Any) -> nn.Module:
    embedding = nn.Embedding(32, 16)
    return holder("Tree", embed=embedding, fc1=linear(change(embedding.weight)))


def custom_embedding() -> nn.Module:
    embedding = holder("Embed")
    embedding.weight = nn.Parameter(torch.randn(32, 16))
    return holder("Tree", embed=embedding, fc1=linear(embedding.weight))


def with_router() -> nn.Module:
    router = linear()
    return holder("Tree", fc1=linear(router.weight.detach()), moe=holder("MoE", router=router))


def with_twin(name: str, *, hooked: bool = False) -> nn.Module:
    first = linear()
    tree = holder("Tree", fc1=first, **{name: linear(first.weight)})
    if hooked:
        tree.get_submodule(name).register_forward_hook(lambda *_: None)
    return tree


KEPT = {
    "an embedding": (lambda: embedding_and(lambda weight: weight), "tied-embedding"),
    "its memory": (lambda: embedding_and(lambda weight: weight.detach()), "tied-embedding"),
    "its first rows": (lambda: embedding_and(lambda weight: weight.detach()[:16]), "tied-embedding"),
    "a custom embedding": (custom_embedding, "tied-embedding"),
    "a router": (with_router, "tied-kept"),
    "an unlisted head": (lambda: with_twin("lm_head"), "tied-kept"),
    "a hooked twin": (lambda: with_twin("fc2", hooked=True), "tied-kept"),
}


@pytest.mark.parametrize(("make", "code"), KEPT.values(), ids=KEPT)
def test_what_shares_a_weight_with_what_is_kept_is_kept(make: Any, code: str) -> None:
    tree = make()
    plan = plan_walk(tree)
    assert codes(plan)["fc1"] == code
    assert code != "tied-embedding" or "embed.weight" in plan["fc1"].reason
    assert swap_linears(tree).plan.swapped == ()


def test_what_is_no_tie_keeps_nothing() -> None:
    """A bias that is shared, memory that was given back, and one flat buffer."""
    tree = holder("Tree", fc1=nn.Linear(16, 16), head=nn.Linear(16, 16))
    tree.head.bias = tree.fc1.bias
    assert plan_walk(tree).swapped == ("fc1",)
    tree = holder("Tree", fc1=linear(), head=linear())
    for layer in (tree.fc1, tree.head):  # as a sharded model is between two steps: sizes stay, memory is none
        layer.weight.untyped_storage().resize_(0)
    assert plan_walk(tree).swapped == ("fc1",)
    embedding, *flat = torch.randn(3 * 256).view(3, 16, 16)
    tree = holder("Tree", embed=nn.Embedding(16, 16, _weight=embedding), fc1=linear(flat[0]), fc2=linear(flat[1]))
    assert plan_walk(tree).swapped == ("fc1", "fc2")


def test_a_module_in_two_places_is_named_twice_and_judged_once() -> None:
    shared = linear()
    tree = holder("Tree", a=nn.Sequential(shared), q_proj=shared)
    plan = plan_walk(tree)
    assert codes(plan) == {"a.0": "not-listed", "q_proj": "not-listed"}
    assert "as a.0" in plan["q_proj"].reason
    assert plan_walk(tree, include=(nn.Sequential,)).swapped == ()
    assert plan_walk(tree, include=(nn.Sequential, "q_proj")).swapped == ("a.0", "q_proj")
    tree.add_module("router", holder("R", q_proj=shared))
    assert set(codes(plan_walk(tree)).values()) == {"moe-router"}
