"""Whose checkpoint recomputes FP8 layers, and in which order: each pass of a layer again, the oldest first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.errors import ScopeEnteredTwice
from megacpp_validate.bridge.fp8_scope import WrongRecomputeOwner, current_scope, high_precision
from megacpp_validate.bridge.layer_watch import RecomputeOutOfOrder, recompute, watch_layers
from megacpp_validate.bridge.te_fp8 import te_recompute, te_state
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


@WAYS
def test_a_scope_in_what_is_run_again_is_refused(either: str, reentrant: bool) -> None:
    """Also on a laptop: what is an error on the GPU is one there."""

    def scoped(given: Any) -> Any:
        with low():
            return given * 2

    for call in (torch_checkpoint, te_recompute)[: 2 if either == "te" else 1]:
        with pytest.raises(WrongRecomputeOwner, match=r"test_recompute_owner.py:\d+.*Next step.*outside"):
            call(scoped, rows(), use_reentrant=reentrant)
    assert current_scope() is None


@WAYS
def test_a_layer_in_torch_s_checkpoint_is_refused(on_te: None, reentrant: bool) -> None:
    layer = te.linear.require()(16, 16, bias=False, device="cpu")
    watch_layers(layer)
    with low(), pytest.raises(WrongRecomputeOwner, match=r"Linear.*torch's checkpoint.*Next step"):
        torch_checkpoint(layer, rows(), use_reentrant=reentrant)
    assert torch_checkpoint(layer, rows(), use_reentrant=reentrant).shape == (16, 16)  # without low precision


def test_what_is_run_again_in_a_thread_of_autograd_s_has_the_scopes_of_its_first_pass(
    on_te: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the second pass runs in a thread of autograd's; here the checkpoint makes one."""
    found: list[Any] = []

    def kept() -> None:
        try:
            with high_precision("a projection that stays"):
                found.append(te_state()["enabled"])
        except ScopeEnteredTwice as refusal:
            found.append(refusal)

    def twice(function: Callable[..., Any], **_: Any) -> None:
        function()
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    twice.__module__ = "no module that owns a recomputation"
    monkeypatch.setattr(te.checkpoint, "_found", (twice, ""))
    with low():
        te_recompute(kept, use_reentrant=True)
        assert found == [False, False]
        assert te_state()["enabled"] is True
        twice(kept)
    assert isinstance(found[-1], ScopeEnteredTwice)  # a thread that is no part of this program
    assert te_state()["enabled"] is False
