"""The checks that the gate requires are those that good runs leave; a check that vanishes from a probe is missed."""

from __future__ import annotations

import pytest

from .checks import read_required, required_on_cpu, required_on_h200


def test_the_committed_receipts_have_the_checks_that_an_h200_must_leave() -> None:
    required = read_required()["h200"]
    assert required == required_on_h200(), "run `python -m tests.cells checks`"
    assert {"imports", "attention", "fp8_delayed", "moe_smoke"} <= required.keys()
    assert min(len(row["checks"]) for row in required.values()) >= 3


@pytest.mark.thorough
def test_a_cpu_leaves_the_checks_that_it_must_leave() -> None:
    assert read_required()["cpu"] == required_on_cpu(2), "run `python -m tests.cells checks`"
