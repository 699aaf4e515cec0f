"""The masked layout of the expert bank: who takes it, what comes out past the counts, what is refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge.backends import NoBackend  # noqa: E402
from megacpp_validate.bridge.errors import TokenCountMismatch, WrongDtype, WrongOption, WrongShape  # noqa: E402
from megacpp_validate.bridge.expert_gemm import ExpertGemm  # noqa: E402
from tests.deep_gemm_double import install  # noqa: E402

COUNTS = (3, 0, 40)


def bank(*backends: str, dtype: torch.dtype = torch.bfloat16) -> ExpertGemm:
    torch.manual_seed(0)
    return ExpertGemm(num_experts=3, in_features=256, out_features=128, dtype=dtype, device="cpu", backends=backends)


def sample(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randn(3, 40, 256).to(dtype)
    rows[0, 3:], rows[1] = float("nan"), float("inf")
    return rows, torch.tensor(COUNTS, dtype=torch.int32)


@torch.no_grad()
def wanted(layer: ExpertGemm, rows: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(3, 40, 128, dtype=torch.float64)
    weights = layer.native_state_dict()["weight"].double()
    for expert, count in enumerate(COUNTS):
        out[expert, :count] = rows[expert, :count].double() @ weights[expert].T
    return out


def test_native() -> None:
    layer = bank("native", dtype=torch.float64)
    rows, counts = sample(torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(layer.forward_masked(rows, counts), wanted(layer, rows))
    assert layer.choice.observed == "native"


@pytest.mark.usefixtures("te_double")
def test_te_has_no_such_layout_and_says_so() -> None:
    layer = bank("te", "native")
    rows, counts = sample()
    with torch.no_grad():
        seen = layer.forward_masked(rows, counts)
    torch.testing.assert_close(seen.double(), wanted(layer, rows), rtol=2**-7, atol=1e-2)
    assert [refusal.code for refusal in layer.choice.refusals] == ["masked"]
    with pytest.raises(NoBackend, match="masked layout"), torch.no_grad():
        bank("te").forward_masked(rows, counts)


def test_deep_gemm_and_weights_that_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    layer = bank("deep_gemm", "native")
    rows, counts = sample()
    with torch.no_grad():
        seen = layer.forward_masked(rows, counts)
        held = layer.quantized_weight()
        assert torch.equal(layer.forward_masked(rows, counts, weight=held), seen)
        layer.bank.weight.neg_()
        assert torch.equal(layer.forward_masked(rows, counts, weight=held), seen), "it is the caller's to renew"
        assert torch.equal(layer.forward_masked(rows, counts), -seen)
    assert layer.choice.observed == "deep_gemm"
    error = float((seen.double() + wanted(layer, rows)).norm() / seen.double().norm())
    assert 0.02 < error < 0.06, "FP8, and no less"


def test_what_does_not_fit_is_refused() -> None:
    layer = bank("native")
    rows, counts = sample()
    with pytest.raises(WrongOption, match="no gradients"):
        layer.forward_masked(rows, counts)
    with torch.no_grad():
        for given, numbers, error in (
            (rows[0], counts, WrongShape),
            (rows[:2], counts, WrongShape),
            (rows[..., :128], counts, WrongShape),
            (rows.float(), counts, WrongDtype),
            (rows, counts[:2], TokenCountMismatch),
            (rows, counts.long(), TokenCountMismatch),
        ):
            with pytest.raises(error, match="Next step"):
                layer.forward_masked(given, numbers)
