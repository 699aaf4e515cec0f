"""Grouped GEMM: the fused path against the loop, which cells of `expert_gemm` hold to fp64.

The fused path is called here through torch's own grouped_mm for the CPU; which kernel a GPU runs is seen only there.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp_validate.native import grouped_gemm as module
from megacpp_validate.native.grouped_gemm import grouped_gemm_loop, grouped_mm_refusal
from megacpp_validate.probes.bounds import Roundings, compare

SPLITS = [[3, 0, 4], [0, 0, 7], [7, 0, 0], [1, 0, 0], [2, 2, 3]]
K, N = 16, 24


def make(split: list[int], dtype: Any = torch.float64, seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    return torch.randn(sum(split), K).to(dtype).requires_grad_(), torch.randn(len(split), N, K).to(
        dtype
    ).requires_grad_()


def fused(rows: Any, weight: Any, split: list[int]) -> Any:
    return module._FusedGroupedGemm.apply(rows, weight, tuple(split))


@pytest.mark.parametrize("split", SPLITS)
def test_the_fused_path_gives_what_the_loop_gives(split: list[int]) -> None:
    results = []
    for path in (fused, grouped_gemm_loop):
        rows, weight = make(split, torch.bfloat16)
        out = path(rows, weight, split)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype))
        results.append((out, rows.grad, weight.grad))
    rows, weight = (item.detach().double().requires_grad_() for item in make(split, torch.bfloat16))
    out = grouped_gemm_loop(rows, weight, split)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().double())
    longest = Roundings((("bf16", 1),), sum_length=max(K, N, *split), why="products rounded once")
    for name, one, other, exact in zip(("out", "rows", "weight"), *results, (out, rows.grad, weight.grad), strict=True):
        check = compare(name, one, exact, roundings=longest, native=other)
        assert check.passed, check


STRIDES: dict[str, Callable[[int, int], Any]] = {
    "expanded": lambda count, width: torch.ones((), dtype=torch.bfloat16).expand(count, width),
    "sliced": lambda count, width: torch.randn(count, 2 * width).bfloat16()[:, ::2],
    "transposed": lambda count, width: torch.randn(width, count).bfloat16().t(),
    "misaligned": lambda count, width: torch.randn(count * width + 1).bfloat16()[1:].view(count, width),
}


@pytest.mark.parametrize("kind", STRIDES)
def test_the_fused_path_takes_operands_and_gradients_of_any_strides(kind: str) -> None:
    split = [3, 0, 4]
    torch.manual_seed(4)
    rows, weight, grad = STRIDES[kind](7, K), STRIDES[kind](3 * N, K).unflatten(0, (3, N)), STRIDES[kind](7, N)
    results = []
    for path in (fused, grouped_gemm_loop):
        given = rows.requires_grad_(), weight.requires_grad_()
        out = path(*given, split)
        results.append((out, *torch.autograd.grad(out, given, grad)))
    for one, other in zip(*results, strict=True):
        # Two bf16 roundings of the same fp32 sum differ by one unit in the last place at most.
        torch.testing.assert_close(one, other, rtol=2.0**-7, atol=2.0**-7)


def test_idle_experts_get_zeros_whatever_the_kernel_left_there(monkeypatch: pytest.MonkeyPatch) -> None:
    true_product = module.grouped_product

    def leaves_rubbish(left: Any, right: Any, ends: Any) -> Any:
        out = true_product(left, right, ends)
        if out.dim() == 3:
            out[1] = float("nan")
        return out

    monkeypatch.setattr(module, "grouped_product", leaves_rubbish)
    rows, weight = make([3, 0, 4], torch.bfloat16)
    fused(rows, weight, [3, 0, 4]).sum().backward()
    assert not weight.grad[1].any()
    assert weight.grad[[0, 2]].any(dim=-1).all()


def test_no_rows_at_all_give_each_weight_a_gradient_of_zeros() -> None:
    rows, weight = make([0, 0, 0])
    grouped_gemm_loop(rows, weight, [0, 0, 0]).sum().backward()
    assert not weight.grad.any()


def on_gpu(rows: int = 8, k: int = K, dtype: Any = torch.bfloat16) -> Any:
    """What the refusal looks at, of rows on a GPU that this machine need not have."""
    return SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype, shape=(rows, k))


def weights_on_gpu(experts: int = 4, n: int = N, k: int = K, dtype: Any = torch.bfloat16) -> Any:
    return SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype, shape=(experts, n, k))


@pytest.mark.parametrize(
    ("rows", "weight", "capability", "reason"),
    [
        (on_gpu(), weights_on_gpu(), (9, 0), ""),
        (on_gpu(), weights_on_gpu(), (10, 0), ""),
        (on_gpu(), weights_on_gpu(), (8, 0), "compute capability 8.0"),
        (on_gpu(), weights_on_gpu(), (12, 1), "compute capability 12.1"),
        (on_gpu(dtype=torch.float32), weights_on_gpu(dtype=torch.float32), (9, 0), "takes bfloat16"),
        (on_gpu(k=12), weights_on_gpu(k=12), (9, 0), "K is 12 and N 24: the fused kernel takes multiples of 8"),
        (on_gpu(rows=0), weights_on_gpu(), (9, 0), "there are no rows"),
    ],
)
def test_the_fused_path_says_why_not(
    monkeypatch: pytest.MonkeyPatch, rows: Any, weight: Any, capability: tuple[int, int], reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    refusal = grouped_mm_refusal(rows, weight)
    assert reason in refusal
    assert bool(refusal) is bool(reason)
