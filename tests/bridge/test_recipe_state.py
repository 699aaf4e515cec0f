"""FP8 state of another recipe is refused before anything is loaded; its own, and what has none, is let through."""

from __future__ import annotations

import pickle

import pytest
import torch

from megacpp_validate.bridge.extra_state import recipe_of_state

pytestmark = pytest.mark.usefixtures("te_double")


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
