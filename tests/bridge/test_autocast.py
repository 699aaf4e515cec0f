"""Inside an autocast region the wrappers give the dtype that they promise, and compute in it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge.attention import Attention  # noqa: E402
from megacpp_validate.bridge.expert_gemm import ExpertGemm  # noqa: E402
from megacpp_validate.native.grouped_gemm import grouped_gemm, grouped_gemm_loop  # noqa: E402

LENGTH = 12
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 3},
    "soft cap": {"softcap": 3.0},
    "packed": {"doc_ids": (torch.arange(LENGTH) // 5).repeat(2, 1)},
    "blocks": {"block_mask": torch.ones(1, 1, 3, 3, dtype=torch.bool).tril(), "block_size": 4},
}


def heads() -> Any:
    torch.manual_seed(0)
    return tuple(torch.randn(2, count, LENGTH, 16) for count in (8, 2, 2))


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_is_computed_in_the_dtype_of_the_query(backend: str, options: dict[str, Any]) -> None:
    layer, given = Attention(num_heads=8, head_dim=16, num_gqa_groups=2, device="cpu"), heads()
    wanted = layer(*given, **options)
    with autocast():
        out = layer(*given, **options)
    assert layer.choice is not None
    assert layer.choice.observed == ("te" if backend == "te" and not options else "sdpa")
    assert out.dtype is torch.float32
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("counts", [(2, 0, 3, 1), (0, 0, 0, 0)])
def test_experts_compute_in_the_dtype_of_their_rows(backend: str, counts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = ExpertGemm(num_experts=4, in_features=16, out_features=32, device="cpu")
    rows = torch.randn(sum(counts), 16)
    wanted = layer(rows, counts)
    with autocast():
        out = layer(rows, counts)
    assert layer.choice.observed == (backend if sum(counts) else "native")
    assert out.dtype is torch.float32
    assert torch.equal(out, wanted)
    for path in (grouped_gemm, grouped_gemm_loop):
        with autocast():
            assert path(rows, torch.randn(4, 32, 16), counts).dtype is torch.float32
