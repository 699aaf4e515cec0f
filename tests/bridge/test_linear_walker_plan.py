"""The plan of the linear walk: one decision a module, by name and with its reason; nothing is changed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")
from torch import nn  # noqa: E402
from torch.nn.utils import prune  # noqa: E402

from megacpp_validate.bridge import features  # noqa: E402
from megacpp_validate.bridge import imports as te  # noqa: E402
from megacpp_validate.bridge.errors import BridgeError, UnknownName  # noqa: E402
from megacpp_validate.bridge.linear_walker import NotATree, plan_walk  # noqa: E402
from tests.bridge.linear_trees import codes, holder, tree_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("te_double")


def changed(change: Any) -> nn.Module:
    layer = nn.Linear(16, 16)
    change(layer)
    return layer


def hook(*_: Any) -> None:
    """Does nothing."""


class Sharded(torch.Tensor):
    """A parameter of another class, as DTensor or a quantized weight is."""


STATES = {
    "forward hook": (lambda layer: layer.register_forward_hook(hook), "hooks"),
    "forward pre-hook": (lambda layer: layer.register_forward_pre_hook(hook), "hooks"),
    "backward hook": (lambda layer: layer.register_full_backward_hook(hook), "hooks"),
    "backward pre-hook": (lambda layer: layer.register_full_backward_pre_hook(hook), "hooks"),
    "state_dict hook": (lambda layer: layer.register_state_dict_post_hook(hook), "hooks"),
    "load hook": (lambda layer: layer.register_load_state_dict_pre_hook(hook), "hooks"),
    "pruned": (lambda layer: prune.identity(layer, "weight"), "hooks"),
    "forward replaced": (lambda layer: setattr(layer, "forward", print), "own-forward"),
    "buffer": (lambda layer: layer.register_buffer("scale", torch.ones(1)), "altered"),
    "parameter": (lambda layer: layer.register_parameter("extra", nn.Parameter(torch.ones(1))), "altered"),
    "child": (lambda layer: layer.add_module("dropout", nn.Dropout()), "altered"),
    "weight is None": (lambda layer: layer.register_parameter("weight", None), "altered"),
    "weight of a class": (
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(16, 16).as_subclass(Sharded))),
        "parameter-type",
    ),
    "transposed": (lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(16, 16).t())), "layout"),
    "another shape": (lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(8, 16))), "layout"),
    "fp64": (lambda layer: layer.double(), "dtype"),
    "mixed": (lambda layer: setattr(layer, "bias", nn.Parameter(torch.randn(16, dtype=torch.bfloat16))), "dtype"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "code"), STATES.values(), ids=STATES)
def test_what_te_would_lose_is_kept(change: Any, code: str) -> None:
    tree = holder("Tree", fc1=changed(change), fc2=nn.Linear(16, 16))
    plan = plan_walk(tree)
    assert codes(plan) == {"fc1": code, "fc2": "listed"}


REFUSED = {
    "flag": (features.read_features(linear=False), {}, "flag-off"),
    "preset": (features.read_features("off"), {}, "flag-off"),
    "environment": (features.PRODUCTION, {"MEGACPP_DISABLE_TE_LINEAR": "1"}, "switched-off"),
    "preset's environment": (features.PRODUCTION, {"MEGACPP_DISABLE_TE_PRODUCTION": "1"}, "switched-off"),
    "all of it": (features.PRODUCTION, {"MEGACPP_DISABLE_TE": "1"}, "te-unavailable"),
}


@pytest.mark.parametrize(("asked", "environment", "code"), REFUSED.values(), ids=REFUSED)
def test_where_te_may_not_be_used_the_layers_are_kept(
    asked: Any, environment: dict[str, str], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    te.TE._verdict = None  # the fixture puts back what was there before
    plan = plan_walk(holder("Tree", fc1=nn.Linear(16, 16), other=nn.Linear(16, 16)), features=asked)
    assert codes(plan) == {"fc1": code, "other": "not-listed"}
    assert plan["fc1"].refusal is not None
    assert plan["fc1"].refusal.reason == plan["fc1"].reason


WIDTHS = {
    "fits": ((32, 64), "delayed", "listed"),
    "in": ((24, 64), "delayed", "fp8-alignment"),
    "out": ((64, 40), "current", "fp8-alignment"),
    "block": ((48, 16), "block", "listed"),
    "mxfp8": ((48, 64), "mxfp8", "fp8-alignment"),
    "mxfp8 fits": ((96, 64), "mxfp8", "listed"),
    "bf16": ((7, 3), None, "listed"),
}


@pytest.mark.parametrize(("shape", "recipe", "code"), WIDTHS.values(), ids=WIDTHS)
def test_widths_fit_the_recipe(shape: Any, recipe: Any, code: str) -> None:
    assert codes(plan_walk(holder("Tree", fc1=nn.Linear(*shape)), recipe=recipe)) == {"fc1": code}


def test_the_tree_itself_cannot_be_swapped() -> None:
    assert codes(plan_walk(nn.Linear(16, 16), include=(nn.Linear,))) == {"": "root"}


BAD = {
    "no module": (lambda: plan_walk({"fc1": nn.Linear(16, 16)}), NotATree),
    "a string for a list": (lambda: plan_walk(tree_of("fc1"), include="fc1"), UnknownName),
    "an empty pattern": (lambda: plan_walk(tree_of("fc1"), include=("",)), UnknownName),
    "no pattern": (lambda: plan_walk(tree_of("fc1"), include=(3,)), UnknownName),
    "no recipe": (lambda: plan_walk(tree_of("fc1"), recipe="fp8"), UnknownName),
}


@pytest.mark.parametrize(("call", "error"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_with_a_next_step(call: Any, error: type[BridgeError]) -> None:
    with pytest.raises(error, match="Next step"):
        call()
