"""A residual connection and its norm in one: what plain torch gives, forward and backward, whoever computes it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import fused as module  # noqa: E402
from megacpp_validate.bridge.fused import add_rms_norm, choose_residual_norm  # noqa: E402
from megacpp_validate.probes.bounds import Roundings, compare  # noqa: E402

EPS = 0.05  # as large as the mean square of a tenth of the rows, so that it counts
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


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


def draw(rows: int, width: int, dtype: Any) -> dict[str, Any]:
    source = torch.Generator().manual_seed(rows)
    drawn = {
        name: torch.randn(3, rows, width, generator=source, dtype=torch.float64)
        for name in ("rows", "added", "of_summed", "of_normed")
    }
    drawn["rows"][:, ::10] *= 0.1  # rows for which eps counts
    drawn["added"][:, ::10] *= 0.1
    drawn["weight"] = 1 + 0.3 * torch.randn(width, generator=source, dtype=torch.float64)
    return {name: value.to(dtype) for name, value in drawn.items()}


def exact(drawn: dict[str, Any]) -> dict[str, Any]:
    """In fp64, but for the sum, which is rounded to the dtype of the rows: that is what both forms norm."""
    summed = drawn["rows"] + drawn["added"]
    inner, weight = summed.double().requires_grad_(), drawn["weight"].double().requires_grad_()
    normed = inner / (inner.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    of_inner, of_weight = torch.autograd.grad(normed, (inner, weight), drawn["of_normed"].double())
    of_rows = of_inner + drawn["of_summed"].double()
    return {"summed": summed, "normed": normed, "of_rows": of_rows, "of_added": of_rows, "of_weight": of_weight}


@pytest.mark.parametrize("dtype", NAMES)
def test_the_plain_form_is_its_formula(dtype: Any) -> None:
    """Bounds in roundings.

    Forward: the square, its mean, eps, the root, two products in fp32, then one rounding to the dtype. Backward the
    same and six more, and differences of terms no larger than twice the result's norm. The plain form rounds the
    gradient of the norm before it adds that of the sum: two roundings more, and of a sum twice in the square.
    """
    rows, width = 40, 96
    drawn, name = draw(rows, width, dtype), NAMES[dtype]
    given = [drawn[part].clone().requires_grad_() for part in ("rows", "added", "weight")]
    summed, normed = add_rms_norm(*given, EPS)
    gradients = torch.autograd.grad((summed, normed), given, (drawn["of_summed"], drawn["of_normed"]))
    seen = {"normed": normed, **dict(zip(("of_rows", "of_added", "of_weight"), gradients, strict=True))}
    wide = "fp64" if name == "fp64" else "fp32"
    backward = Roundings(((wide, 12), (name, 3)), width, wide, 2.0)
    bounds = {
        "normed": Roundings(((wide, 6), (name, 1)), width, wide),
        "of_rows": backward,
        "of_added": backward,
        "of_weight": Roundings(((wide, 8), (name, 1)), width + 3 * rows, wide),
    }
    wanted = exact(drawn)
    assert torch.equal(summed, wanted["summed"])
    for part, roundings in bounds.items():
        check = compare(part, seen[part].detach(), wanted[part].detach(), roundings=roundings)
        assert check.passed, f"{part}: {check.detail}"


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
