"""Liger behind the firewall: what refuses it and why, and the native loss of the head that takes its place."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import liger  # noqa: E402
from megacpp_validate.bridge.layer_spec import build_mlp, build_norm  # noqa: E402


@pytest.mark.parametrize(
    ("device", "dtype", "code"),
    [
        ("cpu", torch.bfloat16, "device"),
        ("cuda", torch.float64, "dtype"),
        ("cuda", torch.bfloat16, "liger-unavailable"),
    ],
)
def test_a_call_that_liger_cannot_take_is_refused_by_code(device: str, dtype: torch.dtype, code: str) -> None:
    refusal = liger.why_not_liger(device, dtype)
    assert refusal is not None
    assert refusal.code == code


def test_it_is_asked_first_and_only_for_what_it_has() -> None:
    made = {"dtype": torch.float32, "device": "cpu"}
    asked = [build_norm(8, liger=True, **made), build_mlp(8, 16, liger=True, **made)]
    assert [layer.choice.requested for layer in asked] == ["liger", "liger"]
    assert build_mlp(8, 16, activation="gelu", liger=True, **made).choice.requested == "te"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_native_loss_is_torch_s_with_frozen_operands(reduction: str) -> None:
    rows, weight = torch.randn(300, 8, dtype=torch.float64, requires_grad=True), torch.randn(17, 8, dtype=torch.float64)
    targets = torch.randint(17, (300,)).masked_fill(torch.arange(300) % 3 == 0, -100)
    given = {"reduction": reduction}
    loss = liger.linear_cross_entropy(rows, weight, targets, **given)
    plain = torch.nn.functional.cross_entropy(rows @ weight.t(), targets, **given)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(torch.autograd.grad(3 * loss, rows), torch.autograd.grad(3 * plain, rows))
