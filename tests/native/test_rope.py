"""Rotary embedding against complex rotation in fp64 and against the real rope.py of Transformer Engine."""

from __future__ import annotations

import ast
import cmath
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp_validate.native.attention import apply_rope, rope_tables
from megacpp_validate.probes.bounds import Roundings, compare


def turn(x: Any, base: float = 10000.0, offset: int = 0) -> Any:
    """Channel j + i x channel (j + D/2), times exp(i x angle)."""
    width, length = x.shape[-1], x.shape[-2]
    rotations = torch.tensor(
        [[cmath.exp(1j * (offset + t) * base ** (-2 * j / width)) for j in range(width // 2)] for t in range(length)],
        dtype=torch.complex128,
    ).reshape(length, width // 2)
    turned = torch.complex(x[..., : width // 2], x[..., width // 2 :]) * rotations
    return torch.cat((turned.real, turned.imag), dim=-1)


def make(*shape: int, dtype: Any = torch.float64, seed: int = 0) -> Any:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=source, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("width", [2, 64, 128])
@pytest.mark.parametrize("length", [1, 33])
@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("base", [10000.0, 5e5])
def test_it_is_a_complex_rotation(width: int, length: int, offset: int, base: float) -> None:
    x = make(2, 3, length, width)
    cos, sin = rope_tables(length + offset + 2, width, base=base, dtype=torch.float64)
    assert cos.shape == sin.shape == (length + offset + 2, width // 2)
    seen = apply_rope(x, cos, sin, offset=offset)
    torch.testing.assert_close(seen, turn(x, base, offset), rtol=1e-12, atol=1e-12)


def test_it_has_the_right_gradients() -> None:
    cos, sin = rope_tables(3, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, cos, sin), (make(1, 2, 3, 6).requires_grad_(),))


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_low_precision_rounds_once_forward_and_backward(name: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]
    x, upstream = make(2, 2, 65, 64, dtype=dtype), make(2, 2, 65, 64, dtype=dtype, seed=1)
    low, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    seen, wanted = apply_rope(low, *rope_tables(65, 64)), turn(exact)
    seen.backward(upstream)
    wanted.backward(upstream.double())
    # Tables, two products and a sum in fp32; then the result.
    roundings = Roundings((("fp32", 4), (name, 1)), 2)
    assert seen.dtype == dtype
    assert compare("out", seen, wanted, roundings=roundings).passed
    assert compare("gradient", low.grad, exact.grad, roundings=roundings).passed


@pytest.mark.parametrize("damage", ["interleaved", "one position late", "other way round", "other base", "not at all"])
def test_the_comparison_sees_a_wrong_rotation(damage: str) -> None:
    x = make(2, 2, 65, 64, dtype=torch.bfloat16)
    cos, sin = rope_tables(66, 64)
    by_pairs = x.unflatten(-1, (32, 2)).transpose(-1, -2).flatten(-2)
    wrong = {
        "interleaved": apply_rope(by_pairs, cos, sin).unflatten(-1, (2, 32)).transpose(-1, -2).flatten(-2),
        "one position late": apply_rope(x, cos, sin, offset=1),
        "other way round": apply_rope(x, cos, -sin),
        "other base": apply_rope(x, *rope_tables(65, 64, base=9000.0)),
        "not at all": x,
    }[damage]
    assert not compare(damage, wrong, turn(x.double()), roundings=Roundings((("bf16", 1),), 2)).passed


def test_scores_depend_on_the_distance_only() -> None:
    query, key = make(1, 1, 1, 64), make(1, 1, 1, 64, seed=1)
    tables = rope_tables(40, 64, dtype=torch.float64)
    scores = [
        (apply_rope(query, *tables, offset=at + 7) * apply_rope(key, *tables, offset=at)).sum() for at in (0, 11, 32)
    ]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3), rtol=1e-12, atol=1e-12)


def test_tables_hold_far_out() -> None:
    cos, sin = rope_tables(131072, 64)
    assert cos.dtype == sin.dtype == torch.float32
    for channel in range(32):
        wanted = cmath.exp(1j * 131071 * 10000.0 ** (-channel / 32))
        # Half a unit in the last place of fp32, and what fp64 leaves of an angle of 1.3e5.
        assert abs(complex(cos[-1, channel], sin[-1, channel]) - wanted) < 2**0.5 * 2.0**-25 + 2.0**-34


def test_strided_heads_give_what_contiguous_ones_give() -> None:
    x = make(2, 9, 3, 8).transpose(1, 2)
    assert not x.is_contiguous()
    tables = rope_tables(9, 8, dtype=torch.float64)
    torch.testing.assert_close(apply_rope(x, *tables), turn(x))


def test_no_position_gives_nothing() -> None:
    assert apply_rope(make(2, 3, 0, 8), *rope_tables(4, 8)).shape == (2, 3, 0, 8)


def test_it_is_what_transformer_engine_computes(wheel_of: Callable[[str], Path]) -> None:
    """TE's unfused path, run from its real source: its frequencies, and its way to apply them."""
    with zipfile.ZipFile(wheel_of("2.20.2")) as archive:
        tree = ast.parse(archive.read("transformer_engine/pytorch/attention/rope.py").decode())
    wanted_names = {"_rotate_half", "_apply_rotary_pos_emb_base"}
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted_names]
    theirs: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(found, type_ignores=[]), "rope.py", "exec"), theirs)

    x = make(2, 3, 17, 64)
    inverse = 1.0 / (10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64))
    angles = torch.einsum("i,j->ij", torch.arange(17, dtype=torch.float64), inverse)
    frequencies = torch.cat((angles, angles), dim=-1).reshape(17, 1, 1, 64)
    wanted = theirs["_apply_rotary_pos_emb_base"](x.transpose(1, 2), frequencies, "bshd").transpose(1, 2)
    seen = apply_rope(x, *rope_tables(17, 64, dtype=torch.float64))
    torch.testing.assert_close(seen, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: rope_tables(4, 7), "head size of 7.*use an even head size"),
        (lambda: rope_tables(4, 0), "head size of 0"),
        (lambda: apply_rope(make(1, 1, 4, 8), *rope_tables(4, 16)), r"rope_tables\(length, 8\)"),
        (lambda: apply_rope(make(1, 1, 4, 8), *rope_tables(3, 8)), "0 to 3 .* hold 3"),
        (lambda: apply_rope(make(1, 1, 4, 8), *rope_tables(5, 8), offset=2), "2 to 5 .* hold 5"),
        (lambda: apply_rope(make(1, 1, 1, 8), *rope_tables(5, 8), offset=-1), "positions -1"),
    ],
)
def test_wrong_input_is_refused_with_the_next_step(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
