"""Both paths of the low-precision scope, for its tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge import recipes
from megacpp_validate.bridge.amax_owner import SINGLE_OWNER
from megacpp_validate.bridge.fp8_scope import current_scope, low_precision
from megacpp_validate.bridge.te_fp8 import te_state

low = partial(low_precision, target="cpu", amax_reduction_group=SINGLE_OWNER)


@contextlib.contextmanager
def with_the_recipes_of(target: str) -> Iterator[None]:
    """This machine, with the recipes of a target; put back before the double is taken away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(recipes.TARGETS, "cpu", replace(recipes.TARGETS[target], id="cpu", arch=""))
        yield


@contextlib.contextmanager
def off_by(variable: str) -> Iterator[None]:
    """What the bridge decides with this variable set; put back before the double is taken away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(te.TE, "_verdict", None)
        patch.setattr(te.TE, "_presets", {})
        patch.setenv(variable, "1")
        yield


@contextlib.contextmanager
def on_path(path: str) -> Iterator[str]:
    """One path, on a target that has what an H200 has; afterwards nothing may be open. "te" wants the double."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(with_the_recipes_of("h200"))
        if path == "native":
            stack.enter_context(off_by("MEGACPP_DISABLE_TE"))
        yield path
        assert current_scope() is None
        assert path == "native" or te_state()["enabled"] is False
