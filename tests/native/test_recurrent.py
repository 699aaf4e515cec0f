"""The matrix recurrence against its unstabilised definition, by chunks and carried; the block written step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megacpp_validate.native.recurrent import (
    MatrixRecurrentBlock,
    MatrixState,
    matrix_recurrence_chunked,
    matrix_recurrence_sequential,
)

B, H, K, V = 2, 3, 4, 5


def make(length: int, dtype: Any = torch.float64, seed: int = 0, gate: float = 1.0) -> tuple[Any, ...]:
    """query, key, value, input gate, forget gate; gates normal with standard deviation `gate`."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Any:
        return torch.randn(shape, generator=source, dtype=torch.float64)

    given = [draw(B, length, H, width) for width in (K, K, V)] + [gate * draw(B, length, H) for _ in range(2)]
    return tuple(item.to(dtype).requires_grad_() for item in given)


def state_of(seed: int = 9) -> MatrixState:
    source = torch.Generator().manual_seed(seed)
    sizes = (B, H, K, V), (B, H, K), (B, H)
    memory, keys, scale = (torch.randn(size, generator=source, dtype=torch.float64) for size in sizes)
    return MatrixState(memory.requires_grad_(), keys.requires_grad_(), scale.abs().requires_grad_())


def parts(state: MatrixState) -> tuple[Any, Any, Any]:
    return state.memory, state.keys, state.scale


def close(one: Any, other: Any, tolerance: float = 1e-10) -> bool:
    """Relative to the norm of the whole."""
    return bool((one - other).norm() <= tolerance * other.norm())


def definition(query: Any, key: Any, value: Any, input_gate: Any, forget_gate: Any, state: Any = None) -> Any:
    """eq. 19 to 27 of the paper without a stabiliser: only where exp does not overflow."""
    memory = torch.zeros(B, H, K, V, dtype=torch.float64)
    keys = torch.zeros(B, H, K, dtype=torch.float64)
    if state is not None:
        memory, keys = (state.scale.exp()[..., None, None] * state.memory, state.scale.exp()[..., None] * state.keys)
    seen = []
    for now in range(query.shape[1]):
        forget, into = torch.sigmoid(forget_gate[:, now]), torch.exp(input_gate[:, now])
        memory = forget[..., None, None] * memory + into[..., None, None] * (
            key[:, now, :, :, None] * value[:, now, :, None]
        )
        keys = forget[..., None] * keys + into[..., None] * key[:, now]
        q = query[:, now] / math.sqrt(K)
        found, weight = (q[..., None] * memory).sum(-2), (q * keys).sum(-1)
        seen.append(found / weight.abs().clamp(min=1)[..., None])
    return torch.stack(seen, dim=1), memory, keys


@pytest.mark.parametrize("gate", [0.1, 1.0, 5.0, 50.0])
@pytest.mark.parametrize("carried", [False, True])
def test_the_stabilised_recurrence_is_the_definition(gate: float, carried: bool) -> None:
    given, first = make(12, gate=gate), state_of() if carried else None
    wanted, memory, keys = definition(*given, first)
    for y, last in (
        matrix_recurrence_sequential(*given, state=first),
        matrix_recurrence_chunked(*given, chunk=5, state=first),
    ):
        # A divisor that is a small difference of large sums magnifies rounding; 1e-10 of the norm leaves room for it.
        assert close(y, wanted)
        assert close(last.scale.exp()[..., None, None] * last.memory, memory)
        assert close(last.scale.exp()[..., None] * last.keys, keys)


@pytest.mark.parametrize("length", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 16, 64])
def test_chunks_of_any_size_give_the_recurrence(length: int, chunk: int) -> None:
    given, first = make(length), state_of()
    results = []
    for scan in (lambda: matrix_recurrence_chunked(*given, chunk=chunk, state=first),
                 lambda: matrix_recurrence_sequential(*given, state=first)):  # fmt: skip
        y, last = scan()
        weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
        loss = (y * weights).sum() + (last.memory.sin().sum() + last.keys.sin().sum() + last.scale.sum())
        results.append((y, *parts(last), *torch.autograd.grad(loss, (*given, *parts(first)))))
    for one, other in zip(*results, strict=True):
        assert close(one, other)


@pytest.mark.parametrize("cuts", [[5, 6], [1, 9, 1], [10, 1], [3, 3, 3, 2]])
def test_a_carried_state_joins_the_pieces(cuts: list[int]) -> None:
    given = make(11)
    whole, last = matrix_recurrence_sequential(*given)
    state, seen = None, []
    for pieces in zip(*(item.split(cuts, dim=1) for item in given), strict=True):
        y, state = matrix_recurrence_chunked(*pieces, chunk=4, state=state)
        seen.append(y)
    assert close(torch.cat(seen, dim=1), whole)
    assert state is not None
    for one, other in zip(parts(state), parts(last), strict=True):
        assert close(one, other)


@pytest.mark.parametrize("chunk", [None, 1, 2, 4])
@pytest.mark.parametrize("shift", [-3.0, 3.0])
def test_gradients_are_right(chunk: int | None, shift: float) -> None:
    whole = [item.detach()[:1, :3, :1] for item in make(3)]
    whole[3] = whole[3] + shift
    inputs = [
        item.clone().requires_grad_() for item in (*whole, *(part.detach()[:1, :1] for part in parts(state_of())))
    ]

    def run(*given: Any) -> tuple[Any, ...]:
        state = MatrixState(*given[5:])
        if chunk is None:
            y, last = matrix_recurrence_sequential(*given[:5], state=state)
        else:
            y, last = matrix_recurrence_chunked(*given[:5], chunk=chunk, state=state)
        return y, *parts(last)

    assert torch.autograd.gradcheck(run, inputs)


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


def test_no_row_sees_a_later_one() -> None:
    block, rows = block_of(), torch.randn(B, 10, 8, dtype=torch.float64)
    changed = rows.clone()
    changed[:, 6] += 1
    before, after = block(rows), block(changed)
    assert close(after[:, :6], before[:, :6], 1e-14)
    assert (after[:, 6:] - before[:, 6:]).abs().amax(dim=-1).gt(1e-6).all()


def test_wrong_input_is_refused_with_the_shapes_that_are_wanted() -> None:
    query, key, value, gate_in, forget = make(6)
    good, run = state_of(), matrix_recurrence_chunked
    other = MatrixState(good.memory[:1], good.keys, good.scale)
    refusals = {
        r"key \(2, 6, 3, 3\)": lambda: run(query, key[..., :3], value, gate_in, forget, chunk=4),
        r"value \(2, 5, 3, 5\)": lambda: run(query, key, value[:, 1:], gate_in, forget, chunk=4),
        r"input_gate \(2, 6, 3, 1\)": lambda: run(query, key, value, gate_in[..., None], forget, chunk=4),
        r"T 1 or more": lambda: run(*(item[:, :0] for item in (query, key, value, gate_in, forget)), chunk=4),
        r"a chunk of 0": lambda: run(query, key, value, gate_in, forget, chunk=0),
        r"an earlier call returned": lambda: run(query, key, value, gate_in, forget, chunk=4, state=other),
        r"gates \[B, T, H\]": lambda: matrix_recurrence_sequential(query, key, value, gate_in, forget[..., 0]),
        r"eps is nan": lambda: MatrixRecurrentBlock(16, num_heads=4, key_dim=4, value_dim=4, eps=math.nan),
        r"num_heads=0": lambda: MatrixRecurrentBlock(16, num_heads=0, key_dim=4, value_dim=4),
        r"\[B, T, 8\] and got \(2, 8\)": lambda: block_of()(torch.zeros(2, 8)),
    }
    for words, call in refusals.items():
        with pytest.raises(ValueError, match=words):
            call()
