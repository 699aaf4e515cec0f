"""What the fused forms take, what they leave to plain torch, and that the rotary embedding rounds once."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import fused as module
from megacpp_validate.bridge.fused import (
    add_rms_norm,
    choose_residual_norm,
    compiled_scan,
    turn_heads,
    why_not_compiled,
)
from megacpp_validate.native.attention import apply_rope, rope_tables
from megacpp_validate.native.mamba import Mamba2Mixer, ssd_chunked
from megacpp_validate.probes.bounds import Roundings, compare

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


B, T, H, D = 2, 9, 3, 8
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("table", [torch.float32, torch.float64])
def test_it_is_the_rotation_rounded_once(dtype: torch.dtype, table: torch.dtype) -> None:
    """Tables, two products and a sum in what is computed in; then the result."""
    cos, sin = rope_tables(T + 3, D, dtype=table)
    mixed = torch.randn(B, T, (H + 2) * D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = mixed.to(dtype)[..., : H * D].unflatten(-1, (H, D))  # a view, as of a projection of query, key and value
    turned = turn_heads(rows, cos, sin)
    wanted = apply_rope(rows.double().transpose(1, 2), cos.double(), sin.double()).transpose(1, 2)
    plain = apply_rope(rows.transpose(1, 2), cos, sin)
    assert turned.dtype == plain.dtype == dtype
    assert turned.is_contiguous()
    roundings = Roundings(((NAMES[torch.promote_types(dtype, table)], 4), (NAMES[dtype], 1)), 2)
    for seen in (turned, plain.transpose(1, 2)):
        check = compare("turned", seen, wanted, roundings=roundings)
        assert check.passed, check.detail


CHUNK, LENGTH = 4, 11


def make_mixer() -> tuple[Any, Any]:
    torch.manual_seed(0)
    mixer = Mamba2Mixer(16, state=8, head_dim=4, chunk=CHUNK)
    return mixer, torch.randn(2, LENGTH, 16)


def test_a_mixer_takes_the_scan_that_it_is_given() -> None:
    mixer, rows = make_mixer()
    names, wanted = list(mixer.state_dict()), mixer(rows)
    mixer.scan = ssd_chunked
    assert torch.equal(mixer(rows), wanted)
    seen = []

    def scan(*given: Any, chunk: int) -> Any:
        seen.append((given[0].shape, chunk))
        y, state = ssd_chunked(*given, chunk=chunk)
        return 2 * y, state

    mixer.scan = scan
    assert not torch.allclose(mixer(rows), wanted)
    assert seen == [((2, LENGTH, 8, 4), CHUNK)]
    assert list(mixer.state_dict()) == names


def test_a_machine_without_a_compiler_takes_the_eager_scan_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    scan, choice = compiled_scan("cpu")
    assert scan is ssd_chunked
    assert (choice.module, choice.requested, choice.observed) == ("compiled_scan", "compiled", "eager")
    assert [refusal.code for refusal in choice.refusals] == ["no-compiler"]
    assert "no-such-compiler" in choice.refusals[0].reason
    monkeypatch.setenv("CXX", sys.executable)  # what can be run is asked, whatever it is
    assert why_not_compiled(torch.device("cpu")) is None
