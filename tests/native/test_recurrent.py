"""The matrix recurrence against its unstabilised definition, with gates that a cell of `layer_spec` does not draw."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megacpp_validate.native.recurrent import matrix_recurrence_chunked

B, H, K, V = 2, 3, 4, 5


def make(length: int, dtype: Any = torch.float64, seed: int = 0, gate: float = 1.0) -> tuple[Any, ...]:
    """query, key, value, input gate, forget gate; gates normal with standard deviation `gate`."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Any:
        return torch.randn(shape, generator=source, dtype=torch.float64)

    given = [draw(B, length, H, width) for width in (K, K, V)] + [gate * draw(B, length, H) for _ in range(2)]
    return tuple(item.to(dtype).requires_grad_() for item in given)


def close(one: Any, other: Any, tolerance: float = 1e-10) -> bool:
    """Relative to the norm of the whole."""
    return bool((one - other).norm() <= tolerance * other.norm())


def definition(query: Any, key: Any, value: Any, input_gate: Any, forget_gate: Any) -> Any:
    """eq. 19 to 27 of the paper without a stabiliser: only where exp does not overflow."""
    memory = torch.zeros(query.shape[0], query.shape[2], key.shape[3], value.shape[3], dtype=torch.float64)
    keys = torch.zeros(memory.shape[:3], dtype=torch.float64)
    seen = []
    for now in range(query.shape[1]):
        forget, into = torch.sigmoid(forget_gate[:, now]), torch.exp(input_gate[:, now])
        memory = forget[..., None, None] * memory + into[..., None, None] * (
            key[:, now, :, :, None] * value[:, now, :, None]
        )
        keys = forget[..., None] * keys + into[..., None] * key[:, now]
        q = query[:, now] / math.sqrt(key.shape[3])
        found, weight = (q[..., None] * memory).sum(-2), (q * keys).sum(-1)
        seen.append(found / weight.abs().clamp(min=1)[..., None])
    return torch.stack(seen, dim=1), memory, keys


@pytest.mark.parametrize(("length", "chunk", "gate"), [(1, 8, 0.1), (33, 1, 5.0), (33, 8, 50.0), (7, 64, 50.0)])
def test_chunks_of_any_size_give_the_definition(length: int, chunk: int, gate: float) -> None:
    given = make(length, gate=gate)
    y, last = matrix_recurrence_chunked(*given, chunk=chunk)
    wanted, memory, keys = definition(*given)
    # A divisor that is a small difference of large sums magnifies rounding; 1e-10 of the norm leaves room for it.
    assert close(y, wanted)
    assert close(last.scale.exp()[..., None, None] * last.memory, memory)
    assert close(last.scale.exp()[..., None] * last.keys, keys)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
    for one, other in zip(
        torch.autograd.grad((y * weights).sum(), given),
        torch.autograd.grad((wanted * weights).sum(), given),
        strict=True,
    ):
        assert close(one, other)
