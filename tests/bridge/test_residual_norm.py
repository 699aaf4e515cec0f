"""A residual connection and its norm in one: what plain torch gives, forward and backward, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable
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


def call(path: Callable[..., Any], drawn: dict[str, Any]) -> dict[str, Any]:
    """Both results and the three gradients."""
    given = [drawn[name].detach().clone().requires_grad_() for name in ("rows", "added", "weight")]
    summed, normed = path(*given, EPS)
    found = torch.autograd.grad((summed, normed), given, (drawn["of_summed"], drawn["of_normed"]))
    of = dict(zip(("of_rows", "of_added", "of_weight"), found, strict=True))
    return {"summed": summed.detach(), "normed": normed.detach(), **of}


def reference(rows: Any, added: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    """In fp64, but for the sum, which is rounded to the dtype of the rows: that is what both forms norm."""
    summed = rows + added
    wide = summed.double()
    return summed, wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def faults(path: Callable[..., Any], drawn: dict[str, Any]) -> list[str]:
    """What lies outside of its bound.

    Forward: the square, its mean, eps, the root, two products in fp32, then one rounding to the dtype. Backward the
    same and six more, and differences of terms no larger than twice the result's norm. The plain form rounds the
    gradient of the norm before it adds that of the sum: two roundings more, and of a sum twice in the square.
    """
    seen, dtype = call(path, drawn), NAMES[drawn["rows"].dtype]
    wide = "fp64" if dtype == "fp64" else "fp32"
    given = [drawn[name].detach().clone().requires_grad_() for name in ("rows", "added", "weight")]
    summed, normed = reference(*given, EPS)
    inner = summed.detach().double().requires_grad_()
    weight = given[2].detach().double().requires_grad_()
    out = inner / (inner.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    of_inner, of_weight = torch.autograd.grad(out, (inner, weight), drawn["of_normed"].double())
    of_rows = of_inner + drawn["of_summed"].double()
    width, count = drawn["rows"].shape[-1], drawn["rows"].numel() // drawn["rows"].shape[-1]
    forward = Roundings(((wide, 6), (dtype, 1)), width, wide)
    backward = Roundings(((wide, 12), (dtype, 3)), width, wide, 2.0)
    of_sum = Roundings(((wide, 8), (dtype, 1)), width + count, wide)
    checks = [
        compare("normed", seen["normed"], normed.detach(), roundings=forward),
        compare("of_rows", seen["of_rows"], of_rows, roundings=backward),
        compare("of_added", seen["of_added"], of_rows, roundings=backward),
        compare("of_weight", seen["of_weight"], of_weight, roundings=of_sum),
    ]
    found = [f"{check.name}: {check.detail}" for check in checks if not check.passed]
    return found if torch.equal(seen["summed"], summed) else ["summed", *found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_plain_form_is_its_formula(dtype: Any) -> None:
    assert faults(add_rms_norm, draw(40, 96, dtype)) == []


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
    with pytest.raises(ValueError, match="does not fit rows"):
        add_rms_norm(rows, rows, torch.ones(4), EPS)
    assert kernels.programs == 0
    apart = rows.transpose(0, 1)
    assert torch.equal(add_rms_norm(apart, apart, weight, EPS)[0], apart + apart)
    assert kernels.programs == 6


def test_the_form_is_recorded_with_its_reason() -> None:
    plain = choose_residual_norm(64, dtype=torch.bfloat16, device="cpu")
    assert (plain.module, plain.requested, plain.observed) == ("residual_norm", "triton", "torch")
    assert [refusal.code for refusal in plain.refusals] == ["device"]
    codes = {
        "dtype": choose_residual_norm(64, dtype=torch.float64, device="cuda"),
        "width": choose_residual_norm(module.WIDEST + 1, dtype=torch.float32, device="cuda"),
    }
    assert all(choice.refusals[0].code == code for code, choice in codes.items())
