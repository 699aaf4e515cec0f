"""What of a residual connection and its norm goes to the kernels; `tests.training.test_layers` holds the plain form."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import fused as module  # noqa: E402
from megacpp_validate.bridge.fused import add_rms_norm, choose_residual_norm  # noqa: E402

EPS = 0.05


class Kernels:
    """Counts the programs of the forward kernel, and writes the sum as the kernel does."""

    programs = 0

    def require(self) -> Kernels:
        return self

    @property
    def add_norm_kernel(self) -> Any:
        return self

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(rows: Any, added: Any, weight: Any, summed: Any, *_: Any, width: int, **__: Any) -> None:
            assert all(tensor.is_contiguous() for tensor in (rows, added, weight, summed))
            assert rows.numel() == grid[0] * width
            self.programs += grid[0]
            summed.copy_(rows + added)

        return launch


def test_what_the_kernels_do_not_take_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two dtypes, an fp64 weight, rows to broadcast, no rows, rows apart in memory."""
    kernels = Kernels()
    monkeypatch.setattr(module, "residual_norm_kernels", kernels)
    monkeypatch.setattr(module, "why_not_fused", lambda *_: None)
    rows, weight = torch.randn(2, 3, 8), torch.ones(8)
    assert add_rms_norm(rows.bfloat16(), rows, weight, EPS)[0].dtype == torch.float32
    add_rms_norm(rows, rows, weight.double(), EPS)
    add_rms_norm(rows, rows[:, :1], weight, EPS)
    assert add_rms_norm(rows[:0], rows[:0], weight, EPS)[1].shape == (0, 3, 8)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        add_rms_norm(rows, rows, torch.ones(4), EPS)
    assert kernels.programs == 0
    apart = rows.transpose(0, 1)
    assert torch.equal(add_rms_norm(apart, apart, weight, EPS)[0], apart + apart)
    assert kernels.programs == 6


@pytest.mark.parametrize(
    ("code", "width", "dtype", "device"),
    [
        ("device", 64, torch.bfloat16, "cpu"),
        ("dtype", 64, torch.float64, "cuda"),
        ("width", module.WIDEST + 1, torch.float32, "cuda"),
    ],
)
def test_the_form_is_recorded_with_its_reason(code: str, width: int, dtype: Any, device: str) -> None:
    choice = choose_residual_norm(width, dtype=dtype, device=device)
    assert (choice.module, choice.requested, choice.observed) == ("residual_norm", "triton", "torch")
    assert [refusal.code for refusal in choice.refusals] == [code]
