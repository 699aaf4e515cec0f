"""One layer under the recipes of a B200: the emulation in the place of Transformer Engine, right and with a fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp_validate.probes import fp8_linear
from megacpp_validate.probes.emulation import emulated_linear
from tests.probes.planting import Patch, failed, fp8_bench


@contextmanager
def scope() -> Iterator[Any]:
    yield SimpleNamespace(choice=None)


# The recipe to look at, the one that runs, and a check that must fail for it.
CASES = [
    ("mxfp8", "mxfp8", ""), ("mxfp8", None, "forward.applied"), ("mxfp8", "block", "blocks"),
    ("mxfp8", "nvfp4", "wgrad"), ("nvfp4", "nvfp4", ""), ("nvfp4", None, "dgrad.applied"),
    ("nvfp4", "mxfp8", "wgrad.applied"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "ran", "caught"), CASES)
def test_the_recipe_that_ran(recipe: Any, ran: Any, caught: str, monkeypatch: Patch) -> None:
    class Layer(torch.nn.Linear):
        def forward(self, rows: Any) -> Any:
            return emulated_linear(rows, self.weight, ran, self.bias) if ran else super().forward(rows)

    def new_layer(bench: Any, case: Any) -> Any:
        layer = Layer(*case.operands["weight"].shape[::-1], dtype=torch.bfloat16)
        layer.load_state_dict({name: case.operands[name] for name in ("weight", "bias")})
        return layer

    monkeypatch.setattr(fp8_linear, "_new_layer", new_layer)
    bench = fp8_bench("recipe", recipe)
    monkeypatch.setattr(bench, "ran_on", lambda *_: None)
    fp8_linear.check_recipe(bench, recipe, scope)
    assert f"fp8.{recipe}.{caught}" in failed(bench) if caught else not failed(bench), sorted(failed(bench))
