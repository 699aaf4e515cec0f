"""FP8 state of another recipe is refused before anything is loaded; its own, and what has none, is let through."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.extra_state import WrongState, load_fp8_state_dict, recipe_of_state
from tests.bridge.scope_paths import low

pytestmark = pytest.mark.usefixtures("on_te")


def model(recipe: str | None = None) -> Any:
    """Two layers in FP8 and a plain one first, which a hook of the others would find loaded."""
    layers = [te.linear.require()(32, 32, params_dtype=torch.float32, device="cpu") for _ in range(2)]
    tree = nn.Sequential(nn.Linear(32, 32), *layers)
    if recipe is not None:
        with low(recipe=recipe):
            out = tree(torch.randn(16, 32))
        out.sum().backward()
    return tree


def is_loaded(tree: Any, source: Any) -> bool:
    return all(map(torch.equal, tree.parameters(), source.parameters()))


def refuse_state(layer: Any, state: Any) -> None:
    if state is not None and state.numel():
        raise RuntimeError("Refusing to load pickled extra state")


OTHER = r"of the recipe delayed for 2 layers \(1, 2\).*Next step"
NONE = r"no FP8 state for 2 layers \(1, 2\).*start_anew=True"
UNREADABLE = r"at the layer 1: RuntimeError: Refusing.*Next step: NVTE_ALLOW"


@pytest.mark.parametrize(
    ("of", "recipe", "said"),
    [
        ("delayed", "current", OTHER),
        ("delayed", "block", OTHER),
        ("current", "delayed", NONE),
        (None, "delayed", NONE),
        ("delayed", "delayed", UNREADABLE),
        ("delayed", None, UNREADABLE),
    ],
)
def test_what_does_not_fit_is_refused_before_the_weights(
    monkeypatch: pytest.MonkeyPatch, of: str | None, recipe: Any, said: str
) -> None:
    tree, source = model(recipe), model(of)
    if said is UNREADABLE:  # as 2.20.2 does without its switch: torch would have loaded the first layers by then
        monkeypatch.setattr(te.linear.require(), "set_extra_state", refuse_state)
    with pytest.raises(WrongState, match=said):
        load_fp8_state_dict(tree, source.state_dict(), recipe=recipe)
    assert not is_loaded(tree[:1], source[:1])


@pytest.mark.parametrize(
    ("of", "recipe", "anew"),
    [("delayed", "delayed", False), ("current", "block", False), (None, "current", False), ("delayed", None, False),
     (None, "delayed", True)],
)  # fmt: skip
def test_what_fits_is_loaded(of: str | None, recipe: Any, anew: bool) -> None:
    tree, source = model(), model(of)
    assert not load_fp8_state_dict(tree, source.state_dict(), recipe=recipe, start_anew=anew).missing_keys
    assert is_loaded(tree, source)


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
