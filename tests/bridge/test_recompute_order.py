"""Recomputation in the order that scales are kept for: each pass of a layer again, the oldest first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.layer_watch import RecomputeOutOfOrder, recompute
from tests.bridge.scope_paths import low

WAYS = pytest.mark.parametrize("reentrant", [True, False])


def new_layer() -> Any:
    return te.linear.require()(16, 16, bias=False, device="cpu")


def rows(factor: float = 1.0) -> Any:
    return (torch.linspace(-1, 1, 256).view(16, 16) * factor).requires_grad_()


def run(layer: Any, reentrant: bool, recipe: str = "delayed", factor: float = 1.0) -> Any:
    with low(recipe=recipe):
        return recompute(layer, rows(factor), use_reentrant=reentrant)


@WAYS
def test_a_pass_that_is_never_run_again_is_told_at_the_next_one(on_te: None, reentrant: bool) -> None:
    layer = new_layer()
    run(layer, reentrant)
    with pytest.raises(RecomputeOutOfOrder, match="Next step"):
        run(layer, reentrant).sum().backward()


@WAYS
def test_the_later_pass_first_is_refused(on_te: None, reentrant: bool) -> None:
    layer = new_layer()
    first, second = run(layer, reentrant), run(layer, reentrant)
    with pytest.raises(RecomputeOutOfOrder, match=r"Linear.*Next step.*oldest first"):
        second.sum().backward()
    first.sum().backward()  # is in its turn


@WAYS
def test_without_transformer_engine_it_is_torch_s(reentrant: bool) -> None:
    calls = []

    def twice(given: Any) -> Any:
        calls.append(1)
        return torch.sin(given)

    given = rows()
    recompute(twice, given, use_reentrant=reentrant).sum().backward()
    assert len(calls) == 2
    assert torch.equal(given.grad, torch.cos(given))
