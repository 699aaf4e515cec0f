"""The trajectory loss: what it is by hand, where it has no direction, and wrong forms of it that are seen."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.training.model import STRIDE, trajectory_loss  # noqa: E402

WIDTH = 6


def walk(length: int, seed: int = 1) -> Any:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(2, length, WIDTH, generator=source, dtype=torch.float64).cumsum(1)


def written_out(rows: Any, stride: int) -> float:
    """Triple after triple, by the formula of the paper."""
    length, seen = rows.shape[1], []
    stride = min(stride, (length - 1) // 2)
    for sequence in rows.double():
        for s in range(0, length - 2 * stride, stride):
            early, late = (sequence[s + stride] - sequence[s]), (sequence[s + 2 * stride] - sequence[s + stride])
            seen.append(1 - float(early @ late) / math.sqrt(float(early @ early) * float(late @ late)))
    return sum(seen) / len(seen)


@pytest.mark.parametrize("length", [3, 4, 16, 17, 18, 40])
def test_it_is_its_formula(length: int) -> None:
    rows = walk(length)
    # Products and sums of WIDTH terms, two roots, a mean: fewer than 100 roundings of numbers not above 2.
    assert float(trajectory_loss(rows)) == pytest.approx(written_out(rows, STRIDE), abs=100 * 2 * 2**-53)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_step_of_zero_counts_0_and_has_a_finite_gradient(dtype: Any) -> None:
    rows = walk(6).to(dtype)
    rows[:, 3] = rows[:, 2]
    rows.requires_grad_()
    loss = trajectory_loss(rows, stride=1)
    loss.backward()
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert bool(rows.grad.isfinite().all())
    assert float(rows.grad[:, :3].abs().sum()) > 0
    # Of the four triples the two around the step of zero count 0, and still count.
    kept = [trajectory_loss(rows[:, first : first + 3], stride=1) for first in (0, 3)]
    assert float(loss.detach()) == pytest.approx(float(sum(kept).detach()) / 4, rel=1e-5)
    still = torch.ones(1, 17, 4, dtype=dtype, requires_grad=True)
    trajectory_loss(still).backward()
    assert not still.grad.any()
