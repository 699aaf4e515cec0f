"""FlashAttention 3 and 4 as fallbacks: what is taken, what is refused and why, and what the real signature is given."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import flash_attention as module
from megacpp_validate.bridge.attention import Attention
from megacpp_validate.bridge.flash_attention import FA3, FA4, KERNELS, flash_attention, why_not_flash
from megacpp_validate.bridge.vendor import Verdict
from megacpp_validate.native.attention import attention as native_attention

SITES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """A GPU of a compute capability, with both libraries there."""

    def pretend(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        for vendor in (FA3, FA4):
            monkeypatch.setattr(vendor, "_verdict", Verdict(True, ""))

    return pretend


# capability, backend, head size, dtype, soft cap -> code of the refusal, or None
VALID: dict[str, tuple[tuple[int, int], str, int, Any, float | None, str | None]] = {
    "hopper-3": ((9, 0), "fa3", 64, torch.bfloat16, None, None),
    "hopper-3-fp16": ((9, 0), "fa3", 128, torch.float16, None, None),
    "hopper-3-widest": ((9, 0), "fa3", 256, torch.bfloat16, None, None),
    "hopper-3-wider": ((9, 0), "fa3", 264, torch.bfloat16, None, "head-size"),
    "hopper-3-odd": ((9, 0), "fa3", 60, torch.bfloat16, None, "head-size"),
    "hopper-3-fp32": ((9, 0), "fa3", 64, torch.float32, None, "dtype"),
    "hopper-3-fp8": ((9, 0), "fa3", 64, torch.float8_e4m3fn, None, "dtype"),
    "hopper-3-capped": ((9, 0), "fa3", 64, torch.bfloat16, 5.0, "soft-cap"),
    "hopper-4": ((9, 0), "fa4", 64, torch.bfloat16, None, None),
    "hopper-4-capped": ((9, 0), "fa4", 64, torch.bfloat16, 5.0, None),
    "blackwell-3": ((10, 0), "fa3", 64, torch.bfloat16, None, "architecture"),
    "blackwell-4": ((10, 0), "fa4", 128, torch.bfloat16, 5.0, None),
    "blackwell-ultra-4": ((10, 3), "fa4", 64, torch.bfloat16, None, None),
    "blackwell-4-wide": ((10, 0), "fa4", 192, torch.bfloat16, None, "head-size"),
    "gb10-3": ((12, 1), "fa3", 64, torch.bfloat16, None, "architecture"),
    "gb10-4": ((12, 1), "fa4", 64, torch.bfloat16, None, None),
    "gb10-4-other": ((12, 1), "fa4", 96, torch.bfloat16, None, "head-size"),
    "gb10-4-capped": ((12, 1), "fa4", 64, torch.bfloat16, 5.0, "soft-cap"),
    "ampere-4": ((8, 0), "fa4", 64, torch.bfloat16, None, "architecture"),
    "something-new": ((13, 0), "fa4", 64, torch.bfloat16, None, "architecture"),
}


@pytest.mark.parametrize("case", VALID.values(), ids=VALID)
def test_the_check_fails_closed(gpu: Callable[[int, int], None], case: tuple[Any, ...]) -> None:
    capability, backend, width, dtype, cap, code = case
    gpu(*capability)
    query = SimpleNamespace(shape=(2, 8, 128, width), dtype=dtype, device=SimpleNamespace(type="cuda"))
    refusal = why_not_flash(KERNELS[backend], query, softcap=cap)
    assert (None if refusal is None else refusal.code) == code
    assert refusal is None or (refusal.backend == backend and len(refusal.reason) > 30)


def test_a_library_is_asked_for_only_where_everything_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FA3, "is_available", lambda: pytest.fail("it was imported"))
    assert why_not_flash(KERNELS["fa3"], torch.ones(1, 1, 1, 64), softcap=None) is not None


# --- what is passed ----------------------------------------------------------------------------------------


class Kernel:
    """A FlashAttention for the CPU: rows first, as the real ones, and what it was called with."""

    def __init__(self, with_logsumexp: bool) -> None:
        self.with_logsumexp = with_logsumexp
        self.keywords: dict[str, Any] = {}

    def __call__(self, q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        self.keywords = keywords
        left, right = keywords["window_size"]
        window = None if left in (None, -1) else left + 1
        assert right == 0 if window else right in (None, -1)
        heads = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = native_attention(
            *heads, causal=keywords["causal"], scale=keywords["softmax_scale"], window=window,
            softcap=keywords["softcap"] or None,
        ).transpose(1, 2)  # fmt: skip
        return (out, None) if self.with_logsumexp else out


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Kernel], None]:
    """A kernel under the library's name."""

    def put(backend: str, kernel: Kernel) -> None:
        name, root = SITES[backend], SITES[backend].partition(".")[0]
        fake = ModuleType(name)
        fake.flash_attn_func = kernel  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, root, ModuleType(root))
        monkeypatch.setitem(sys.modules, name, fake)
        monkeypatch.setattr(KERNELS[backend].vendor, "_verdict", None)
        for entry in (module.fa3_attention, module.fa4_attention):
            monkeypatch.setattr(entry, "_found", None)

    return put


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "window": None, "softcap": None, "scale": None},
    "no-mask": {"causal": False, "window": None, "softcap": None, "scale": None},
    "window": {"causal": True, "window": 5, "softcap": None, "scale": None},
    "window-of-one": {"causal": True, "window": 1, "softcap": None, "scale": None},
    "soft-cap-and-scale": {"causal": True, "window": None, "softcap": 0.7, "scale": 0.5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("backend", "with_logsumexp"), [("fa3", False), ("fa3", True), ("fa4", True)])
def test_a_call_means_the_same_on_every_path(
    install: Callable[[str, Kernel], None], backend: str, with_logsumexp: bool, options: dict[str, Any]
) -> None:
    install(backend, Kernel(with_logsumexp))
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 12, 8, dtype=torch.float64) for heads in (4, 2, 2))
    out = flash_attention(KERNELS[backend], query, key, value, **options)
    torch.testing.assert_close(out, native_attention(query, key, value, **options))


def test_the_wrapper_takes_flash_attention_where_te_refuses(
    install: Callable[[str, Kernel], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(True)
    install("fa4", kernel)
    monkeypatch.setattr("megacpp_validate.bridge.attention.why_not_flash", lambda kernels, query, softcap: None)
    layer = Attention(num_heads=4, head_dim=8, num_gqa_groups=2, backends=("te", "fa4", "sdpa"), device="cpu")
    query, key, value = (torch.randn(1, heads, 12, 8) for heads in (4, 2, 2))
    out = layer(query, key, value, softcap=0.7)
    assert (layer.choice.observed, kernel.keywords["softcap"]) == ("fa4", 0.7)
    torch.testing.assert_close(out, native_attention(query, key, value, softcap=0.7))
    layer(query, key, value, doc_ids=torch.zeros(1, 12, dtype=torch.int32))
    assert layer.choice.observed == "sdpa"
    assert [refusal.code for refusal in layer.choice.refusals] == ["packed-documents", "packed-documents"]
