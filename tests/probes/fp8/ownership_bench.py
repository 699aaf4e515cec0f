"""Runs of the probes of ownership on the double of Transformer Engine, for their tests."""

from __future__ import annotations

from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.order import Order, Target

DOUBLE = Target("cpu", "", ("delayed", "current", "block"), "delayed")


def new_bench(name: str, *, recipes: tuple[str, ...] = ("delayed", "current", "block"), seed: int = 0) -> Bench:
    """A bench on the CPU, smallest shapes."""
    target = Target("cpu", "", recipes, "delayed")
    return Bench(
        Order(
            f"fp8_{name}",
            "double",
            target,
            "te",
            seed=seed,
            quick=True,
            code=f"fp8.{name}",
            stands_on=("imports", "fp8_scope", "native_block"),
        )
    )


def failed(bench: Bench) -> set[str]:
    return {check.name for check in bench.checks if not check.passed}
