"""Payload and scale of every quantized tensor go together, and what cannot be handed over is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import quantized_tensor  # noqa: E402
from megacpp_validate.bridge.backends import Refusal  # noqa: E402
from megacpp_validate.bridge.errors import WrongShape  # noqa: E402
from megacpp_validate.bridge.quantized_tensor import (  # noqa: E402
    ScaledPayload,
    read_payload,
)
from tests.bridge import te_tensors as te  # noqa: E402

Make = Callable[[], Any]

TENSORS: dict[str, tuple[Make, str]] = {
    "rows of 128, odd": (lambda: te.blocks(7, 200, square=False), "1x128"),
    "squares, odd": (lambda: te.blocks(130, 520, square=True), "128x128"),
    "squares, turned": (lambda: te.blocks(520, 130, square=True, turned=True), "128x128"),
    "exponents": (te.exponents, "1x32"),
    "exponents, odd": (lambda: te.exponents(33, 64), "1x32"),
    "exponents, turned": (lambda: te.exponents(64, 48, turned=True), "32x1"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_payload_and_scale_are_what_the_tensor_says_itself(name: str) -> None:
    make, block = TENSORS[name]
    tensor = make()
    payload = read_payload(tensor)
    assert isinstance(payload, ScaledPayload)
    assert (payload.block, payload.convention) == (block, "multiply")
    assert (payload.payload.shape, payload.logical_dtype) == (tensor.shape, torch.bfloat16)
    assert torch.equal(payload.values(), tensor.dequantize())


def test_a_payload_is_not_made_without_a_scale_that_fits() -> None:
    payload = torch.ones(4, 256).to(torch.float8_e4m3fn)
    with pytest.raises(WrongShape, match=r"needs \(4, 2\) scales, and has \(2, 4\)"):
        ScaledPayload(payload, torch.ones(2, 4), "multiply", "1x128", torch.bfloat16, "planted")


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: te.exponents(swizzled=True), "swizzled"),
        (lambda: te.NVFP4Tensor((4, 4)), "kind"),
        (lambda: _with(te.one_scale(), "_data"), "no-data"),
        (lambda: _with(te.one_scale(turned=True), "_transpose_invalid", True), "no-data"),
        (lambda: _with(te.blocks(8, 128, square=False), "_rowwise_scale_inv"), "no-data"),
        (lambda: _with(te.exponents(), "_rowwise_data"), "no-data"),
    ],
)
def test_what_has_no_payload_says_why(make: Make, code: str) -> None:
    found = read_payload(make())
    assert isinstance(found, Refusal)
    assert found.code == code


def _with(tensor: Any, part: str, value: Any = None) -> Any:
    setattr(tensor, part, value)
    return tensor


def test_it_is_announced_while_it_runs_and_not_after(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    plain = ScaledPayload.values

    def listen(self: Any, **options: Any) -> Any:
        said.append(quantized_tensor.saying())
        return plain(self, **options)

    monkeypatch.setattr(ScaledPayload, "values", listen)
    quantized_tensor.dequantize(te.one_scale(), "a test asks")
    assert said == ["a test asks"]
    assert quantized_tensor.saying() == ""


# --- torchao ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "block"), [((), "tensor"), ((48, 1), "row"), ((1, 32), "column")])
def test_torchaos_scales_of_training_divide(shape: Any, block: str) -> None:
    kind = type("Float8TrainingTensor", (te.Wrapped,), {"__module__": "torchao.float8.float8_training_tensor"})
    data = te.one_scale()._data.view(torch.float8_e4m3fn)
    payload = read_payload(kind((48, 32), _data=data, _scale=torch.full(shape, 5.0)))
    assert isinstance(payload, ScaledPayload)
    assert (payload.block, payload.convention) == (block, "divide")
    assert torch.equal(payload.values(), (data.float() / 5).to(torch.bfloat16))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("granularity", ["PerTensor", "PerRow"])
def test_torchaos_scales_of_inference_multiply(granularity: str) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="not-run: there is no torchao")
    from torchao.quantization.quantize_.workflows import Float8Tensor

    values = torch.randn(48, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    tensor = Float8Tensor.from_hp(values, granularity=getattr(quantization, granularity)())
    payload = read_payload(tensor)
    assert isinstance(payload, ScaledPayload)
    assert (payload.block, payload.convention) == ("tensor" if granularity == "PerTensor" else "row", "multiply")
    assert torch.equal(payload.values(), tensor.dequantize())
