"""One run of the probe `fp8.recipe` on the double of Transformer Engine, for its tests."""

from __future__ import annotations

import pytest

from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.order import Order, Target

DOUBLE = Target("cpu", "", ("delayed", "current", "block"), "delayed")
Patch = pytest.MonkeyPatch


def new_bench(recipe: str = "delayed", target: Target = DOUBLE, seed: int = 0, requested: str = "te") -> Bench:
    """A bench on the CPU, smallest shapes."""
    return Bench(
        Order(
            f"fp8_{recipe}",
            "double",
            target,
            requested,
            seed=seed,
            quick=True,
            code="fp8.recipe",
            stands_on=("imports", "fp8_scope"),
            settings={"recipe": recipe},
        )
    )


def failed(bench: Bench) -> list[str]:
    return [check.name for check in bench.checks if not check.passed]
