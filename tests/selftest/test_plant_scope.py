"""The fault of a layer that the low-precision scope does not reach: that layer alone, and only where a scope is on."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import imports as te  # noqa: E402
from megacpp_validate.evidence.selftest import Fault  # noqa: E402
from tests.selftest.planting import planted, vendor  # noqa: E402

pytestmark = pytest.mark.usefixtures("te_double")


def run(layer: Any, rows: Any, *, low: bool) -> Any:
    with te.autocast.require()(enabled=low, recipe=te.float8_current_scaling.require()()):
        return layer(rows)


def test_a_layer_ignores_the_scope() -> None:
    torch.manual_seed(0)
    rows = torch.randn(16, 16)
    with planted(vendor("linear", Fault.SCOPE_IGNORED)) as trace:
        layer, other = te.linear.require()(16, 16, device="cpu"), te.layernorm_linear.require()(16, 16, device="cpu")
        plain = run(layer, rows, low=False)
        assert trace.reached == 0
        assert torch.equal(run(layer, rows, low=True), plain)
        assert trace.reached == 1
        assert not torch.equal(run(other, rows, low=True), run(other, rows, low=False))
    again = te.linear.require()(16, 16, device="cpu")
    assert not torch.equal(run(again, rows, low=True), run(again, rows, low=False))
