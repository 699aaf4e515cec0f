"""The guard of FP8 layers: what is not finite is named, sizes and places are refused; nothing else is in the way."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megacpp_validate.bridge import fp8_scope, layer_watch
from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.errors import NotDivisible, WrongTarget
from megacpp_validate.bridge.layer_watch import Fp8Guard, NotFinite

NAN, INFINITY = float("nan"), float("inf")
RECIPES = ["delayed", "current", "block"]
pytestmark = pytest.mark.usefixtures("te_double")


def linear(width: int = 32, out: int = 32) -> Any:
    layer = te.linear.require()(width, out, bias=False, params_dtype=torch.bfloat16, device="cpu")
    nn.init.normal_(layer.weight, std=0.1)
    return layer


def low(recipe: str = "delayed") -> Any:
    return fp8_scope.low_precision(target="cpu", amax_reduction_group=None, recipe=recipe)


def rows(count: int = 16, width: int = 32) -> Any:
    return torch.randn(count, width, dtype=torch.bfloat16, requires_grad=True)


def with_hole(tensor: Any, value: float) -> Any:
    made = tensor.detach().clone()
    made[1, 2] = value
    return made.requires_grad_()


def model() -> Any:
    return nn.Sequential(linear(), nn.Linear(32, 32, dtype=torch.bfloat16), nn.Sequential(linear(), linear()))


def test_what_is_watched() -> None:
    """Layers of Transformer Engine with weights that are cast, by their names; a norm and a plain layer are not."""
    tree = nn.Sequential(linear(), te.rmsnorm.require()(32, dtype=torch.bfloat16, device="cpu"), nn.Linear(32, 32))
    assert Fp8Guard(tree).layers == ("0",)
    assert Fp8Guard(model()).layers == ("0", "2.0", "2.1")
    assert Fp8Guard(nn.Linear(2, 2)).layers == ()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("value", "kind"), [(NAN, "NaN"), (INFINITY, "an infinity"), (-INFINITY, "an infinity")])
def test_an_input_is_named(recipe: str, value: float, kind: str) -> None:
    tree = model()
    with Fp8Guard(tree) as guard:
        with low(recipe):
            tree(with_hole(rows(), value))
        with pytest.raises(NotFinite, match=rf"{kind} in the input of the layer 0 at step 41 .*Next step"):
            guard.end_step(41)
        with low(recipe):
            tree(rows())
        guard.end_step(42)  # what was seen is forgotten


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_layer_where_it_comes_up_first_is_named(recipe: str) -> None:
    tree = model()
    tree[1].weight.data[0, 0] = NAN  # in bf16, between two layers in FP8
    with Fp8Guard(tree) as guard:
        with low(recipe):
            tree(rows())
        with pytest.raises(NotFinite, match=r"the input of the layer 2\.0 at step 3"):
            guard.end_step(3)


def test_a_weight_is_named() -> None:
    tree = model()
    tree[2][0].weight.data[0, 0] = NAN
    with Fp8Guard(tree) as guard:
        with low():
            tree(rows())
        with pytest.raises(NotFinite, match=r"the weight of the layer 2\.0 at step 3"):
            guard.end_step(3)


def test_a_weight_of_the_last_layer_is_named_from_its_gradient() -> None:
    tree = model()
    tree[2][1].weight.data[0, 0] = NAN
    with Fp8Guard(tree) as guard:
        with low():
            out = tree(rows())
        out.pow(2).sum().backward()
        with pytest.raises(NotFinite, match=r"the weight of the layer 2\.1 at step 3"):
            guard.end_step(3)


def test_a_gradient_is_named_where_it_comes_from() -> None:
    tree = model()
    with Fp8Guard(tree) as guard:
        with low():
            out = tree(rows())
        out.backward(with_hole(torch.ones_like(out), NAN))
        with pytest.raises(NotFinite, match=r"gradient of the output of the layer 2\.1 at step 3"):
            guard.end_step(3)


def test_every_call_of_a_step_counts() -> None:
    """With gradient accumulation, one bad micro-batch among good ones is found at the end of the step."""
    tree = model()
    with Fp8Guard(tree) as guard:
        for value in (NAN, 1.0, 1.0):
            with low():
                out = tree(with_hole(rows(), value))
            out.sum().backward()
        with pytest.raises(NotFinite, match="NaN"):
            guard.end_step(0)


def test_large_and_empty_and_none_are_let_through() -> None:
    tree = model()
    with Fp8Guard(tree) as guard:
        guard.end_step(0)  # nothing ran
        with low():
            tree(with_hole(rows(), 3e38))
        guard.end_step(1)
        with low():
            tree(rows(0))
        guard.end_step(2)


def test_in_high_precision_nothing_is_looked_at() -> None:
    tree = model()
    with Fp8Guard(tree) as guard:
        tree(with_hole(rows(5), NAN))
        guard.end_step(0)


def test_one_synchronization_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers and calls: the values leave the device once."""
    left: list[str] = []

    def counted(name: str, plain: Any) -> Any:
        def call(self: Any, *given: Any) -> Any:
            left.append(name)
            return plain(self, *given)

        return call

    for name in ("tolist", "item", "__bool__", "__float__", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
    tree = model()
    with Fp8Guard(tree) as guard:
        with low("current"):
            out = tree(rows())
        out.sum().backward()
        assert left == []
        guard.end_step(0)
    assert left == ["tolist"]


def test_a_model_may_be_moved_afterwards() -> None:
    tree = model().to("meta")
    with Fp8Guard(tree) as guard:
        tree.to_empty(device="cpu")
        for weight in tree.parameters():
            weight.data.normal_(std=0.1)
        with low():
            tree(with_hole(rows(), NAN))
        with pytest.raises(NotFinite, match="the layer 0 "):
            guard.end_step(0)


def test_closed_it_is_gone() -> None:
    tree = model()
    with Fp8Guard(tree):
        pass
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in tree.modules())


def test_the_same_bits_with_and_without() -> None:
    tree, given = model(), rows()
    with low("current"):
        plain = tree(given)
    with Fp8Guard(tree), low("current"):
        watched = tree(given)
    assert torch.equal(plain, watched)


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


def test_an_input_by_name_is_seen() -> None:
    layer = linear()
    with Fp8Guard(layer) as guard:
        with low():
            layer(inp=with_hole(rows(), NAN))
        with pytest.raises(NotFinite, match="the layer at the root"):
            guard.end_step(0)


def test_no_amax_shows_a_nan() -> None:
    """What the guard is for: a maximum that leaves a NaN out, as the kernels take it, has nothing to tell."""
    values = torch.tensor([1.0, NAN, 2.0])
    kept = partial(torch.linalg.vector_norm, ord=float("inf"))
    assert torch.fmax(values[0], values[1]).isfinite()
    assert kept(values).isnan()
