"""The walk itself: all or nothing, the very parameters, nothing else touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")
from torch import nn  # noqa: E402

from megacpp_validate.bridge import linear_walker  # noqa: E402
from megacpp_validate.bridge.errors import WeightMismatch  # noqa: E402
from megacpp_validate.bridge.features import read_features  # noqa: E402
from megacpp_validate.bridge.fp8_scope import te_quantized_weights  # noqa: E402
from megacpp_validate.bridge.linear_walker import PlanMismatch, plan_walk, swap_linears  # noqa: E402

pytestmark = pytest.mark.usefixtures("te_double")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.q_proj = nn.Linear(16, 16, bias=False)
        self.out_proj = nn.Linear(16, 16)
        self.experts = nn.ModuleList(nn.ModuleDict({"w1": nn.Linear(16, 32), "w2": nn.Linear(32, 16)}) for _ in "ab")
        self.norm = nn.LayerNorm(16)

    def forward(self, rows: Any) -> Any:
        rows = rows + self.out_proj(self.q_proj(self.norm(rows)))
        shares = torch.softmax(self.router(rows), -1)
        return rows + sum(
            shares[..., place : place + 1] * expert["w2"](torch.relu(expert["w1"](rows)))
            for place, expert in enumerate(self.experts)
        )


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(16, 8, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        rows = self.embed(tokens)
        for block in self.blocks:
            rows = block(rows)
        return self.lm_head(rows)


PER_BLOCK = ("q_proj", "out_proj", "experts.0.w1", "experts.0.w2", "experts.1.w1", "experts.1.w2")
SWAPPED = {f"blocks.{block}.{name}" for block in (0, 1) for name in PER_BLOCK}


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def test_weights_in_the_recipes_format_are_refused(model: Model) -> None:
    before = dict(model.named_modules())
    with te_quantized_weights(enabled=True, recipe=None), pytest.raises(WeightMismatch, match="Next step"):
        swap_linears(model)
    assert dict(model.named_modules()) == before


def test_without_te_the_tree_stays_and_says_why(model: Model) -> None:
    before = dict(model.named_modules())
    swap = swap_linears(model, features=read_features(linear=False))
    assert dict(model.named_modules()) == before
    assert set(swap.choices) == SWAPPED
    for choice in swap.choices.values():
        assert (choice.requested, choice.observed, choice.refusals[0].code) == ("te", "native", "flag-off")


def edited(plan: Any) -> Any:
    """The plan with its router turned to `swap` by hand."""
    turned = [
        linear_walker.Decision(decision.name, "swap", "listed", decision.reason)
        if decision.name == "blocks.0.router"
        else decision
        for decision in plan.decisions
    ]
    return linear_walker.WalkPlan(tuple(turned), plan.include, plan.features, plan.recipe)


def drop_a_layer(model: Model) -> None:
    del model.blocks[1].experts[1]["w1"]


STALE: dict[str, tuple[Callable[[Any], Any], Callable[[Model], Any]]] = {
    "edited": (edited, lambda model: None),
    "a hook since": (lambda plan: plan, lambda model: model.blocks[0].q_proj.register_forward_hook(print)),
    "a layer less": (lambda plan: plan, drop_a_layer),
    "a layer more": (lambda plan: plan, lambda model: model.blocks[0].add_module("fc1", nn.Linear(16, 16))),
    "done already": (lambda plan: plan, swap_linears),
}


@pytest.mark.parametrize(("edit", "change"), STALE.values(), ids=STALE)
def test_a_plan_that_does_not_hold_is_refused(model: Model, edit: Any, change: Any) -> None:
    plan = edit(plan_walk(model))
    change(model)
    before = dict(model.named_modules())
    with pytest.raises(PlanMismatch, match="Next step"):
        swap_linears(model, plan)
    assert dict(model.named_modules()) == before


class Stubborn(nn.Module):
    """Takes no other module in."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(16, 16)
        self.closed = True

    def add_module(self, name: str, module: Any) -> None:
        raise RuntimeError("closed")


def test_an_error_while_putting_in_brings_back_what_was_there() -> None:
    tree = nn.ModuleDict({"a": nn.ModuleDict({"fc1": nn.Linear(16, 16)}), "b": Stubborn()})
    before = dict(tree.named_modules())
    with pytest.raises(RuntimeError, match="closed"):
        swap_linears(tree)
    assert dict(tree.named_modules()) == before
