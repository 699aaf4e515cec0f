"""FP8 state of another recipe is refused before anything is loaded; its own, and what has none, is let through."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from megacpp_validate.bridge import fp8_scope
from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.extra_state import WrongState, load_fp8_state_dict, recipe_of_state

pytestmark = pytest.mark.usefixtures("te_double")


def model(recipe: str | None = None) -> Any:
    """Two layers in FP8 and a plain one first, which a hook of the others would find loaded."""
    layers = [te.linear.require()(32, 32, params_dtype=torch.float32, device="cpu") for _ in range(2)]
    tree = nn.Sequential(nn.Linear(32, 32), *layers)
    if recipe is not None:
        with fp8_scope.low_precision(target="cpu", amax_reduction_group=None, recipe=recipe):
            out = tree(torch.randn(16, 32))
        out.sum().backward()
    return tree


def values(tree: Any) -> list[Any]:
    return [value.detach().clone() for value in tree.parameters()]


def is_as_before(tree: Any, before: list[Any]) -> bool:
    return all(torch.equal(new, old) for new, old in zip(tree.parameters(), before, strict=True))


@pytest.mark.parametrize("ran", [True, False])
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_delayed_state_for_another_recipe(recipe: str, ran: bool) -> None:
    tree = model(recipe if ran else None)
    before = values(tree)
    with pytest.raises(WrongState, match=rf"of the recipe delayed for 2 layers \(1, 2\).*to run {recipe}.*Next step"):
        load_fp8_state_dict(tree, model("delayed").state_dict(), recipe=recipe)
    assert is_as_before(tree, before)


@pytest.mark.parametrize("ran", [True, False])
@pytest.mark.parametrize("other", ["current", "block", None])
def test_another_recipe_s_state_for_delayed(other: str | None, ran: bool) -> None:
    tree = model("delayed" if ran else None)
    before = values(tree)
    state = model(other).state_dict()
    with pytest.raises(WrongState, match=r"no FP8 state for 2 layers \(1, 2\).*start_anew=True"):
        load_fp8_state_dict(tree, state, recipe="delayed")
    assert is_as_before(tree, before)
    load_fp8_state_dict(tree, state, recipe="delayed", start_anew=True)
    assert not is_as_before(tree, before)


@pytest.mark.parametrize(
    ("recipe", "of"),
    [("delayed", "delayed"), ("current", "current"), ("block", "current"), ("current", None), (None, "delayed")],
)
def test_what_fits_is_loaded(recipe: Any, of: str | None) -> None:
    tree, source = model(), model(of)
    given = load_fp8_state_dict(tree, source.state_dict(), recipe=recipe)
    assert not given.missing_keys
    assert is_as_before(tree, values(source))
    if recipe == "delayed":
        assert torch.equal(tree[1].fp8_meta["scaling_fwd"].amax_history, source[1].fp8_meta["scaling_fwd"].amax_history)


class DelayedScaling:
    """A class by that name."""


class Float8CurrentScaling:
    """Older releases write recipes without a history, too."""


class Unknown:
    """One that nobody knows."""


@pytest.mark.parametrize(
    ("recipe", "wanted"), [(DelayedScaling, "delayed"), (Float8CurrentScaling, "current"), (Unknown, "delayed")]
)
def test_the_recipe_of_a_pickle_is_read_and_not_run(recipe: type, wanted: str) -> None:
    written = bytearray(pickle.dumps({"recipe": recipe(), "scale_fwd": torch.ones(3)}))
    assert recipe_of_state(torch.frombuffer(written, dtype=torch.uint8)) == wanted


def test_what_te_does_not_read_is_refused_before_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 2.20.2 does without its switch: torch would have loaded the first layers by then."""
    tree, source = model(), model("delayed")
    before, kind = values(tree), te.linear.require()
    plain = kind.set_extra_state

    def refuse(self: Any, state: Any) -> None:
        if state is not None and state.numel():
            raise RuntimeError("Refusing to load pickled extra state")
        plain(self, state)

    monkeypatch.setattr(kind, "set_extra_state", refuse)
    for recipe in ("delayed", None):
        with pytest.raises(WrongState, match=r"at the layer 1: RuntimeError: Refusing.*Next step: NVTE_ALLOW"):
            load_fp8_state_dict(tree, source.state_dict(), recipe=recipe)  # type: ignore[arg-type]
        assert is_as_before(tree, before)
    with pytest.raises(RuntimeError, match="Refusing"):
        tree.load_state_dict(source.state_dict())
    assert not is_as_before(tree, before)
