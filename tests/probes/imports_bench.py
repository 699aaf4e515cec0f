"""One run of the probe `imports`, for its tests."""

from __future__ import annotations

import pytest

from megacpp_validate.probes import imports as imports_probe
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.order import Order, Target

NATIVE = Target("cpu", "")
DOUBLE = Target("cpu", "", ("delayed", "current", "block"), "delayed")
Patch = pytest.MonkeyPatch


def run(requested: str, target: Target, seed: int = 0) -> Bench:
    bench = new_bench(requested, target, seed)
    imports_probe.probe(bench)
    return bench


def new_bench(requested: str = "te", target: Target = DOUBLE, seed: int = 0) -> Bench:
    """A bench on the CPU, smallest shapes."""
    return Bench(Order("imports", "double", target, requested, seed=seed, quick=True))


def failed(bench: Bench) -> list[str]:
    return [check.name for check in bench.checks if not check.passed]
