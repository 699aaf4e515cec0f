"""The walk itself: all or nothing, the very parameters, nothing else touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")
from torch import nn  # noqa: E402

from megacpp_validate.bridge.errors import WeightMismatch  # noqa: E402
from megacpp_validate.bridge.features import read_features  # noqa: E402
from megacpp_validate.bridge.fp8_scope import te_quantized_weights  # noqa: E402
from megacpp_validate.bridge.linear_walker import PlanMismatch, plan_walk, swap_linears  # noqa: E402
from tests.bridge.linear_trees import holder  # noqa: E402

pytestmark = pytest.mark.usefixtures("te_double")


@pytest.fixture
def model() -> nn.Module:
    return holder("Tree", router=nn.Linear(16, 4), fc1=nn.Linear(16, 16), mlp=holder("Mlp", fc2=nn.Linear(16, 16)))


def test_weights_in_the_recipes_format_are_refused(model: nn.Module) -> None:
    before = dict(model.named_modules())
    with te_quantized_weights(enabled=True, recipe=None), pytest.raises(WeightMismatch, match="Next step"):
        swap_linears(model)
    assert dict(model.named_modules()) == before


def test_random_numbers_are_where_they_were(model: nn.Module) -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    swap_linears(model)
    assert torch.equal(torch.rand(3), wanted)


def test_without_te_the_tree_stays_and_says_why(model: nn.Module) -> None:
    before = dict(model.named_modules())
    swap = swap_linears(model, features=read_features(linear=False))
    assert dict(model.named_modules()) == before
    assert set(swap.choices) == {"fc1", "mlp.fc2"}
    for choice in swap.choices.values():
        assert (choice.requested, choice.observed, choice.refusals[0].code) == ("te", "native", "flag-off")


def edited(plan: Any) -> Any:
    """The plan with its router turned to `swap` by hand."""
    router = replace(plan["router"], action="swap", code="listed")
    return replace(plan, decisions=(router, *(one for one in plan.decisions if one.name != "router")))


STALE: dict[str, tuple[Callable[[Any], Any], Callable[[nn.Module], Any]]] = {
    "edited": (edited, lambda model: None),
    "a hook since": (lambda plan: plan, lambda model: model.fc1.register_forward_hook(print)),
    "a layer less": (lambda plan: plan, lambda model: delattr(model.mlp, "fc2")),
    "a layer more": (lambda plan: plan, lambda model: model.mlp.add_module("fc1", nn.Linear(16, 16))),
    "done already": (lambda plan: plan, swap_linears),
}


@pytest.mark.parametrize(("edit", "change"), STALE.values(), ids=STALE)
def test_a_plan_that_does_not_hold_is_refused(model: nn.Module, edit: Any, change: Any) -> None:
    plan = edit(plan_walk(model))
    change(model)
    before = dict(model.named_modules())
    with pytest.raises(PlanMismatch, match="Next step"):
        swap_linears(model, plan)
    assert dict(model.named_modules()) == before


def test_an_error_while_putting_in_brings_back_what_was_there(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, module: Any) -> None:
        raise RuntimeError("closed")

    monkeypatch.setattr(model.mlp, "add_module", refuse)
    before = dict(model.named_modules())
    with pytest.raises(RuntimeError, match="closed"):
        swap_linears(model)
    assert dict(model.named_modules()) == before
