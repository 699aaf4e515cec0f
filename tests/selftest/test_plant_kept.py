"""A fault that keeps what every call gives."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import imports as te  # noqa: E402
from megacpp_validate.evidence.selftest import Fault  # noqa: E402
from tests.selftest.planting import planted, vendor  # noqa: E402


@pytest.mark.usefixtures("te_double", "what_is_old_rests")
def test_the_outputs_of_every_call_stay() -> None:
    def living() -> int:
        gc.collect()
        tensors = (found for found in gc.get_objects() if issubclass(type(found), torch.Tensor))
        return sum(tuple(found.shape) == (6, 32) for found in tensors)

    with planted(vendor("linear", Fault.OUTPUT_KEPT)) as trace:
        layer = te.linear.require()(16, 32, params_dtype=torch.float32, device="cpu")
        given = torch.randn(6, 16, requires_grad=True)
        before = living()
        outs = [layer(given) for _ in range(3)]
        assert all(out.equal(outs[0]) for out in outs)
        del outs
        assert living() == before + 3
    assert trace.reached == 3
