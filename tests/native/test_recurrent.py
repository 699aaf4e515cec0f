"""The matrix recurrence against its unstabilised definition, by chunks and carried; the block written step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megacpp_validate.native.recurrent import MatrixRecurrentBlock, matrix_recurrence_chunked

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


@pytest.mark.parametrize("gate", [0.1, 5.0, 50.0])
@pytest.mark.parametrize("length", [1, 7, 16, 33])
@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
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


def block_of(dtype: Any = torch.float64) -> MatrixRecurrentBlock:
    """A block whose every parameter matters: none at its first value."""
    torch.manual_seed(5)
    block = MatrixRecurrentBlock(8, num_heads=H, key_dim=K, value_dim=V, chunk=4).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5 + 0.1)
    return block.to(dtype)


def step_by_step(block: MatrixRecurrentBlock, rows: Any) -> Any:
    normed = rows / (rows.square().mean(-1, keepdim=True) + block.eps).sqrt() * block.in_projection.layer_norm_weight
    projected = normed @ block.in_projection.weight.t()
    ends = [H * K, 2 * H * K, 2 * H * K + H * V, 2 * H * K + 2 * H * V, 2 * H * K + 2 * H * V + H]
    query, key, value, gate, gate_in, forget = projected.tensor_split(ends, dim=-1)
    y, _, _ = definition(
        query.reshape(B, -1, H, K),
        key.reshape(B, -1, H, K),
        value.reshape(B, -1, H, V),
        gate_in + block.input_bias,
        forget + block.forget_bias,
    )
    heads = (y / (y.square().mean(-1, keepdim=True) + block.eps).sqrt()).flatten(2)
    return rows + (heads * block.norm_weight / (1 + torch.exp(-gate))) @ block.out_projection.weight.t()


@pytest.mark.parametrize("length", [1, 2, 4, 11])
def test_the_block_is_what_it_says(length: int) -> None:
    block = block_of()
    rows = torch.randn(B, length, 8, dtype=torch.float64, requires_grad=True)
    results = []
    for forward in (block, lambda rows: step_by_step(block, rows)):
        out = forward(rows)
        results.append((out, *torch.autograd.grad(out.square().sum(), (rows, *block.parameters()))))
    names = ["out", "rows", *(name for name, _ in block.named_parameters())]
    for name, one, other in zip(names, *results, strict=True):
        # The first step has nothing to forget.
        assert other.any() or (length == 1 and name == "forget_bias")
        assert close(one, other)
