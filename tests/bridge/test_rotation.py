"""The rotary embedding: `native.attention.apply_rope` gives, forward and backward, from any layout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import fused
from megacpp_validate.bridge.fused import turn_heads
from megacpp_validate.native.attention import apply_rope, rope_tables

B, T, H, D = 2, 9, 3, 8


def heads(dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """Query as a projection of query, key and value gives it: a view of every other column block."""
    mixed = torch.randn(B, T, H * D + 2 * D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return mixed.to(dtype)[..., : H * D].unflatten(-1, (H, D)).requires_grad_()


def reference(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return apply_rope(rows.double().transpose(1, 2), cos.double(), sin.double()).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("table", [torch.float32, torch.float64])
def test_it_is_the_rotation_rounded_once(dtype: torch.dtype, table: torch.dtype) -> None:
    """Bound: half a unit in the last place of what is written, and three roundings of what is computed in."""
    cos, sin = rope_tables(T + 3, D, dtype=table)
    rows, exact = heads(dtype), heads(dtype)
    turned, wanted = turn_heads(rows, cos, sin), reference(exact, cos, sin)
    gradient = torch.randn(turned.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    turned.backward(gradient)
    wanted.backward(gradient.double())
    assert turned.dtype == dtype
    assert turned.is_contiguous()
    wide = torch.promote_types(dtype, table)
    for found, right, size in ((turned, wanted, rows), (rows.grad, exact.grad, gradient)):
        most = 2.0 * float(size.detach().abs().max())
        bound = most * (torch.finfo(dtype).eps / 2 + 3 * torch.finfo(wide).eps)
        # The gradient that reaches the rows of the reference is rounded to their dtype there.
        bound += most * torch.finfo(dtype).eps / 2
        assert float((found.detach().double() - right.detach().double()).abs().max()) <= bound


def test_gradients_are_those_of_finite_differences() -> None:
    cos, sin = rope_tables(T, D, dtype=torch.float64)
    rows = torch.randn(1, T, 2, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    assert torch.autograd.gradcheck(lambda given: turn_heads(given, cos, sin), rows)


@pytest.mark.parametrize("name", ["other sign", "halves swapped", "first position again"])
def test_a_wrong_rotation_is_far_out_of_that_bound(name: str) -> None:
    cos, sin = rope_tables(T, D)
    wrong = {
        "other sign": lambda rows: turn_heads(rows, cos, -sin),
        "halves swapped": lambda rows: turn_heads(rows, sin, cos),
        "first position again": lambda rows: turn_heads(rows, cos[:1].expand(T, -1), sin[:1].expand(T, -1)),
    }[name]
    rows = heads(torch.float32)
    assert float((wrong(rows).double() - reference(rows, cos, sin)).detach().abs().max()) > 0.1


def test_tables_that_want_a_gradient_get_one() -> None:
    cos, sin = (table.requires_grad_() for table in rope_tables(T, D))
    turn_heads(heads(torch.float32), cos, sin).square().sum().backward()
    assert cos.grad is not None
    assert sin.grad is not None


def test_nothing_of_the_rows_is_kept_for_the_backward_pass() -> None:
    kept: list[torch.Tensor] = []

    def keep(saved: torch.Tensor) -> torch.Tensor:
        kept.append(saved)
        return saved

    cos, sin = rope_tables(T, D)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        turn_heads(heads(torch.bfloat16), cos, sin)
    assert sum(saved.numel() for saved in kept) == cos.numel() + sin.numel()


class Emulated:
    """Stands where the kernel stands: the same index arithmetic, a program at a time, over flat memory."""

    def __init__(self) -> None:
        self.programs = 0

    def require(self) -> Emulated:
        return self

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def run(rows: Any, cos: Any, sin: Any, out: Any, length: int, heads: int, *numbers: Any, **shape: int) -> None:
            assert out.is_contiguous()
            assert shape["wide"] >= shape["half"]
            flat = rows.as_strided((rows.untyped_storage().nbytes() // rows.itemsize - rows.storage_offset(),), (1,))
            for token, group in itertools.product(*map(range, grid)):
                self.programs += 1
                first = group * shape["group"]
                for head in range(first, min(first + shape["group"], heads)):
                    target = out.view(-1)[(token * heads + head) * 2 * shape["half"] :]
                    one_head(divmod(token, length), head, flat, (cos, sin), target, numbers, shape["half"])

        return run


def one_head(
    at: tuple[int, int], head: int, flat: Any, tables: tuple[Any, Any], target: Any, numbers: Any, half: int
) -> None:
    of_batch, of_token, of_head, of_cos, of_sin, sign = numbers
    turn, across = (
        table.flatten()[at[1] * stride :][:half] for table, stride in zip(tables, (of_cos, of_sin), strict=True)
    )
    start = at[0] * of_batch + at[1] * of_token + head * of_head
    first, second = flat[start : start + half].float(), flat[start + half : start + 2 * half].float()
    target[:half] = first * turn - second * across * sign
    target[half : 2 * half] = second * turn + first * across * sign


@pytest.mark.parametrize("count", [1, 3, 16, 40])
@pytest.mark.parametrize("width", [2, 12, 128])
@pytest.mark.parametrize("layout", ["of a projection", "contiguous", "heads first", "channels apart"])
def test_the_kernel_is_handed_every_head_once_from_any_layout(
    monkeypatch: pytest.MonkeyPatch, count: int, width: int, layout: str
) -> None:
    given = torch.randn(B, 3, count + 2, width, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    rows = {
        "of a projection": given.flatten(2)[..., : count * width].unflatten(-1, (count, width)),
        "contiguous": given[:, :, :count].contiguous(),
        "heads first": given[:, :, :count].transpose(1, 2).contiguous().transpose(1, 2),
        "channels apart": given[:, :, :count].transpose(1, 3).contiguous().transpose(1, 3),
    }[layout]
    cos, sin = (table[:3] for table in rope_tables(5, width))
    kernel, out, wanted = Emulated(), torch.full(rows.shape, torch.nan, dtype=rows.dtype), torch.empty_like(rows)
    monkeypatch.setattr(fused, "turn_kernel", kernel)
    fused.launch_turn(rows, cos, sin, out, -1.0)
    fused.turn_by_halves(rows, cos, sin, wanted, -1.0)
    assert torch.equal(out, wanted)
    assert kernel.programs == B * 3 * -(-count // max(1, fused.ELEMENTS // (1 << (width // 2 - 1).bit_length())))
