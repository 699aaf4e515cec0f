"""Recomputation in the order that scales are kept for: each pass of a layer again, the oldest first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.fp8_scope import high_precision
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
def test_one_after_the_other_and_as_a_pipeline(on_te: None, reentrant: bool) -> None:
    layer = new_layer()
    for _ in range(3):
        run(layer, reentrant).sum().backward()
    outs = [run(layer, reentrant, factor=factor) for factor in (1.0, 3.0, 2.0)]
    for out in outs:
        out.sum().backward()


@WAYS
def test_the_later_pass_first_is_refused(on_te: None, reentrant: bool) -> None:
    layer = new_layer()
    first, second = run(layer, reentrant), run(layer, reentrant)
    with pytest.raises(RecomputeOutOfOrder, match=r"a pass of Linear.*that one's scales.*Next step.*oldest first"):
        second.sum().backward()
    first.sum().backward()  # is in its turn


@WAYS
def test_one_backward_pass_for_two_is_refused(on_te: None, reentrant: bool) -> None:
    layer = new_layer()
    outs = [run(layer, reentrant) for _ in range(2)]
    with pytest.raises(RecomputeOutOfOrder):
        (outs[0] + outs[1]).sum().backward()


@WAYS
def test_a_pass_that_is_never_run_again_is_told_at_the_next_one(on_te: None, reentrant: bool) -> None:
    layer = new_layer()
    run(layer, reentrant)
    with pytest.raises(RecomputeOutOfOrder, match="never ran"):
        run(layer, reentrant).sum().backward()


@WAYS
def test_without_gradients_nothing_is_laid_aside(on_te: None, reentrant: bool) -> None:
    layer = new_layer()
    with torch.no_grad():
        run(layer, reentrant)
    run(layer, reentrant).sum().backward()


@WAYS
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_scales_from_the_tensor_at_hand_have_no_order(on_te: None, reentrant: bool, recipe: str) -> None:
    layer = new_layer()
    (run(layer, reentrant, recipe) + run(layer, reentrant, recipe)).sum().backward()


@WAYS
def test_high_precision_has_no_order(on_te: None, reentrant: bool) -> None:
    layer = new_layer()
    with high_precision("a zone"):
        outs = [recompute(layer, rows(), use_reentrant=reentrant) for _ in range(2)]
    (outs[0] + outs[1]).sum().backward()
    run(layer, reentrant).sum().backward()


@WAYS
def test_layers_are_told_apart(on_te: None, reentrant: bool) -> None:
    """In one backward pass the last layer is first; each has its own order."""
    one, two = new_layer(), new_layer()
    for _ in range(2):
        with low():
            out = recompute(two, recompute(one, rows(), use_reentrant=reentrant), use_reentrant=reentrant)
        out.sum().backward()


@WAYS
def test_a_layer_that_a_function_runs_twice_is_run_twice_again(on_te: None, reentrant: bool) -> None:
    layer = new_layer()
    for _ in range(2):
        with low():
            out = recompute(lambda given: layer(layer(given)), rows(), use_reentrant=reentrant)
        out.sum().backward()


def test_the_look_is_taken_away_again(on_te: None) -> None:
    from torch.nn.modules.module import _global_forward_pre_hooks

    def fails(_: Any) -> Any:
        raise KeyError

    with pytest.raises(KeyError), low():
        recompute(fails, rows(), use_reentrant=False)
    run(new_layer(), True).sum().backward()
    assert not _global_forward_pre_hooks


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
