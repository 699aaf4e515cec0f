"""The guard of FP8 layers: what is not finite is named, sizes and places are refused; nothing else is in the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megacpp_validate.bridge import fp8_scope, layer_watch
from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.errors import NotDivisible, WrongTarget
from megacpp_validate.bridge.layer_watch import Fp8Guard

pytestmark = pytest.mark.usefixtures("te_double")


def linear(width: int = 32, out: int = 32) -> Any:
    layer = te.linear.require()(width, out, bias=False, params_dtype=torch.bfloat16, device="cpu")
    nn.init.normal_(layer.weight, std=0.1)
    return layer


def low(recipe: str = "delayed") -> Any:
    return fp8_scope.low_precision(target="cpu", amax_reduction_group=None, recipe=recipe)


def rows(count: int = 16, width: int = 32) -> Any:
    return torch.randn(count, width, dtype=torch.bfloat16, requires_grad=True)


def model() -> Any:
    return nn.Sequential(linear(), nn.Linear(32, 32, dtype=torch.bfloat16), nn.Sequential(linear(), linear()))


@pytest.mark.parametrize(
    ("recipe", "count", "width", "words"),
    [
        ("DelayedScaling", 24, 32, "rows in multiples of 16 and widths in multiples of 16"),
        ("Float8BlockScaling", 16, 40, "rows in multiples of 16 and widths in multiples of 16"),
        ("MXFP8BlockScaling", 24, 32, "rows in multiples of 32 and widths in multiples of 32"),
    ],
)
def test_sizes_are_refused(monkeypatch: pytest.MonkeyPatch, recipe: str, count: int, width: int, words: str) -> None:
    state = {"enabled": True, "recipe": type(recipe, (), {})()}
    monkeypatch.setattr(layer_watch, "te_state", lambda: state)
    tree = nn.ModuleDict({"in": linear(width)})
    with Fp8Guard(tree), pytest.raises(NotDivisible, match=rf"the layer in was given {count} rows.*{words}.*Next step"):
        tree["in"](rows(count, width))


def test_without_gradients_multiples_of_8_are_taken() -> None:
    tree = model()
    with Fp8Guard(tree), low(), torch.no_grad():
        tree(rows(24))
        with pytest.raises(NotDivisible, match="rows in multiples of 8 "):
            tree(rows(12))


def test_in_high_precision_nothing_is_looked_at() -> None:
    tree = model()
    with Fp8Guard(tree) as guard:
        tree(rows(5) * float("nan"))
        guard.end_step(0)


def test_sizes_of_experts_are_refused() -> None:
    bank = te.grouped_linear.require()(3, 32, 32, bias=False, params_dtype=torch.bfloat16, device="cpu")
    with Fp8Guard(nn.ModuleDict({"bank": bank})), low():
        bank(rows(48), [16, 0, 32])
        with pytest.raises(NotDivisible, match=r"bank was given 16, 8, 24 rows.*multiples of 16"):
            bank(rows(48), [16, 8, 24])


def test_a_tensor_on_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_watch, "features", SimpleNamespace(TE_DEVICES=frozenset({"cuda"})))
    tree = model()
    with Fp8Guard(tree), low(), pytest.raises(WrongTarget, match=r"the layer 0 lies on cpu.*DelayedScaling.*Next step"):
        tree(rows())
