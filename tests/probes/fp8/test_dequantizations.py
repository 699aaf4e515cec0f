"""Whoever reads an FP8 tensor in a wider format is seen, once, with where and because of what."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "bridge"))
from megacpp_validate.bridge import quantized_tensor  # noqa: E402
from megacpp_validate.probes.fp8.wrappers import Watch, watching_dequantizations  # noqa: E402
from tests.bridge import te_tensors as te  # noqa: E402


def watch(deed: Callable[[], Any]) -> Watch:
    with watching_dequantizations(quantized_tensor.saying) as seen:
        deed()
    return seen


def _payload() -> Any:
    return quantized_tensor.read_payload(te.one_scale()).payload  # type: ignore[union-attr]


def _backward() -> None:
    payload = _payload()

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Any) -> Any:
            return rows * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient * payload.to(torch.float32)

    Reads.apply(torch.ones(48, 32, requires_grad=True)).sum().backward()


SILENT: dict[str, tuple[Callable[[], Any], int]] = {
    "its own method": (lambda: te.one_scale().dequantize(), 1),
    "an operator that does not know it": (lambda: te.one_scale() * 1.0, 1),
    "a product that does not know them": (lambda: te.one_scale(48, 32) @ te.one_scale(32, 48), 2),
    "a cast of the payload": (lambda: _payload().to(torch.bfloat16), 1),
    "a copy of the payload": (lambda: torch.empty(48, 32).copy_(_payload()), 1),
    "a cast in the backward pass": (_backward, 1),
    "values of a payload": (lambda: quantized_tensor.read_payload(te.one_scale()).values(), 1),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("name", SILENT)
def test_silent_ones_are_counted(name: str) -> None:
    deed, count = SILENT[name]
    seen = watch(deed)
    assert len(seen.silent) == count, seen.seen


def test_where_names_the_code_that_asked() -> None:
    (one,) = watch(lambda: te.one_scale().dequantize()).silent
    assert one.what.endswith("Float8Tensor.dequantize")
    assert one.where.startswith("test_dequantizations.py:")


def test_a_compiled_kernel_of_the_vendor_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = ModuleType("transformer_engine_torch")
    compiled.dequantize = lambda tensor, dtype: tensor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", compiled)
    seen = watch(lambda: compiled.dequantize(1, 2))
    assert [one.what for one in seen.silent] == ["transformer_engine_torch.dequantize"]


def _fails() -> None:
    assert vars(te.Float8Tensor)["dequantize"].__module__ != te.__name__
    raise ZeroDivisionError


def test_everything_is_as_before_afterwards() -> None:
    before = vars(te.Float8Tensor)["dequantize"]
    with pytest.raises(ZeroDivisionError):
        watch(_fails)
    assert vars(te.Float8Tensor)["dequantize"] is before
