"""The rotary embedding: `native.attention.apply_rope` gives, forward and backward, from any layout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

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


def test_tables_that_want_a_gradient_get_one() -> None:
    cos, sin = (table.requires_grad_() for table in rope_tables(T, D))
    turn_heads(heads(torch.float32), cos, sin).square().sum().backward()
    assert cos.grad is not None
    assert sin.grad is not None


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
