"""Captured modules: they replay where that is right, and refuse what Transformer Engine replays without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import graph_capture
from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.errors import WrongShape
from megacpp_validate.bridge.fp8_scope import high_precision
from megacpp_validate.bridge.graph_capture import GraphMisused, capture_graphs
from megacpp_validate.bridge.te_fp8 import te_state
from tests.bridge.scope_paths import low


class Pair(torch.nn.Module):  # type: ignore[misc]
    """Two layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (te.linear.require()(16, 16, bias=False, device="cpu") for _ in range(2))

    def forward(self, rows: Any, is_first_microbatch: bool | None = None) -> Any:
        between = self.first(rows, is_first_microbatch=is_first_microbatch)
        return self.second(between, is_first_microbatch=is_first_microbatch)


def rows(count: int = 16, dtype: Any = torch.float32) -> Any:
    return torch.ones(count, 16, dtype=dtype, requires_grad=True)


def captured(scope: Any = None, **options: Any) -> Pair:
    pair = Pair()
    choice = capture_graphs([pair], [(rows(),)], scope or low(), warmup=1, **options)
    assert choice.observed == "te"
    return pair


def test_the_capture_takes_recipe_and_group_from_the_scope(on_te: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = graph_capture.te_capture

    def capture(modules: Any, samples: Any, precision: Any, **more: Any) -> Any:
        seen.append((type(precision.recipe).__name__, precision.is_low, precision.group, more))
        return real(modules, samples, precision, **more)

    monkeypatch.setattr(graph_capture, "te_capture", capture)
    captured(low(recipe="block"), cache_weights=True)
    assert seen == [("Float8BlockScaling", True, None, {"warmup": 1, "cache_weights": True})]
    assert te_state()["enabled"] is False


def test_outside_of_the_scope_nothing_is_replayed(on_te: None) -> None:
    pair = captured()
    with pytest.raises(GraphMisused, match=r"DelayedScaling.*no low-precision scope.*Next step"):
        pair(rows())
    with low(), high_precision("inside"), pytest.raises(GraphMisused):
        pair(rows())


def test_another_recipe_is_refused_in_training_and_evaluation(on_te: None) -> None:
    pair = captured()
    for module in (pair, pair.eval()):
        with low(recipe="current"), pytest.raises(GraphMisused, match="another recipe or reduction group"):
            module(rows())


@pytest.mark.parametrize("given", [(1, torch.float32), (8, torch.float32), (16, torch.bfloat16)])
def test_another_shape_or_dtype_is_refused(on_te: None, given: tuple[int, Any]) -> None:
    pair = captured()
    with low(), pytest.raises(WrongShape, match=r"captured for.*Next step"):
        pair(rows(*given))


def clone_history(pair: Pair) -> None:
    state = pair.second.fp8_meta["scaling_bwd"]
    state.amax_history = state.amax_history.clone()


REPLACED: dict[str, Callable[[Pair], object]] = {
    "second.weight": lambda pair: setattr(pair.second, "weight", torch.nn.Parameter(torch.ones(16, 16))),
    "second.weigh[t]": lambda pair: setattr(pair.second.weight, "data", torch.ones(16, 16)),
    "second.scaling_bwd.amax_history": clone_history,
    "second.scaling_fwd": lambda pair: pair.second.fp8_meta.pop("scaling_fwd"),
    "first.scaling_fwd.quantizers": lambda pair: pair.first.quantizers.update(scaling_fwd=[]),
    "first.weight": lambda pair: pair.first._fp8_workspaces.clear(),
}


@pytest.mark.parametrize(("name", "replace"), REPLACED.items(), ids=REPLACED)
def test_what_the_graph_uses_may_not_be_replaced(on_te: None, name: str, replace: Callable[[Pair], object]) -> None:
    """Planted one by one; the last two as Transformer Engine has them, and the double has not."""
    pair = Pair()
    pair.first.quantizers = {"scaling_fwd": [object()]}
    pair.first._fp8_workspaces = {"weight": torch.ones(())}
    capture_graphs([pair], [(rows(),)], low(), warmup=1)
    with low():
        pair(rows())
    replace(pair)
    with low(), pytest.raises(GraphMisused, match=rf"uses another .*{name}.*Next step"):
        pair(rows())


class Static(torch.autograd.Function):  # type: ignore[misc]
    """As a replay before 2.19: the gradient of the weight is one buffer for ever, overwritten by each pass."""

    buffer = torch.zeros(16, 16)

    @staticmethod
    def forward(ctx: Any, given: Any, weight: Any) -> Any:
        ctx.save_for_backward(given)
        return given @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (given,) = ctx.saved_tensors
        Static.buffer.copy_(gradient.t() @ given)
        return None, Static.buffer.detach()


@pytest.mark.parametrize("copies", [False, True])
def test_gradients_of_micro_batches_add_up(on_te: None, monkeypatch: pytest.MonkeyPatch, copies: bool) -> None:
    """Planted: with a release that is thought to copy, twice the last gradient is what is left."""

    def capture(modules: Any, *_: Any, **__: Any) -> Any:
        (module,) = modules
        module.forward = lambda given: Static.apply(given, module.first.weight)
        return modules

    def capture_2_19(modules: Any, *given: Any, clone_param_grads_on_return: bool = True, **more: Any) -> Any:
        return capture(modules, *given, **more)

    monkeypatch.setattr(te.make_graphed_callables, "_found", (capture_2_19 if copies else capture, ""))
    pair = captured()
    for factor in (1.0, 2.0):
        with low():
            pair(rows() * factor).sum().backward()
    assert float(pair.first.weight.grad[0, 0]) == (64.0 if copies else 48.0)


def test_what_cannot_be_captured_is_refused(on_te: None) -> None:
    pair = captured()
    with pytest.raises(GraphMisused, match="captured already"):
        capture_graphs([pair], [(rows(),)], low())
    with pytest.raises(GraphMisused, match="evaluation mode"):
        capture_graphs([Pair().eval()], [(rows(),)], low())


def test_without_transformer_engine_modules_stay_as_they_are() -> None:
    module = torch.nn.Linear(16, 16)
    choice = capture_graphs([module], [(rows(),)], low())
    assert (choice.observed, choice.refusals[0].code) == ("native", "not-low")
    assert "forward" not in module.__dict__
    choice = capture_graphs([module], [(rows(),)], high_precision("bf16"))
    assert (choice.observed, choice.refusals[0].code) == ("native", "te-unavailable")
