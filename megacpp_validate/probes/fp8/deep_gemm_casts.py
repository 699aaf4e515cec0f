"""The casts that DeepGEMM's operands come from: the kernels give the bits of their references in plain torch."""

from __future__ import annotations

from typing import Any, Final

import torch

from ..bench import Bench
from .deep_gemm_samples import BF16

COLUMNS: Final = ("none", "vectors", "blocks")
CAPACITY: Final = 70
HEIGHT: Final = 256
WIDTH: Final = 384


def check_casts(bench: Bench, counts: tuple[int, ...]) -> None:
    """Every copy that a cast makes, bit by bit: values, scales, groups, fingerprints.

    Rows of zeros, of next to nothing and of large values are among them, and one value in a thousand is an outlier.
    """
    casts = bench.bridge("deep_gemm_cast")
    tokens = _odd(bench, bench.randn(sum(counts), WIDTH))
    weight = _odd(bench, bench.randn(2 * HEIGHT, WIDTH)).view(2, HEIGHT, WIDTH)
    tiles = casts.plan_tiles(counts, bench.device)
    strided = torch.stack([tokens, tokens], dim=1).view(len(tokens), -1)[:, :WIDTH]
    for power_of_two in (False, True):
        with bench.scope("powers-of-two" if power_of_two else "plain"):
            for columns in COLUMNS:
                how = {"columns": columns, "power_of_two": power_of_two}
                wanted = casts.cast_tokens_reference(tokens, tiles, **how)
                _same(bench, f"tokens.{columns}", casts.cast_tokens(tokens, tiles, **how), wanted)
                _same(bench, f"strided.{columns}", casts.cast_tokens(strided, tiles, **how), wanted)
                if columns != "none":
                    alone = casts.cast_tokens(tokens, tiles, rows=False, **how)
                    _same(bench, f"columns.{columns}", alone, (None, wanted[1]))
            for name, more in {"weight": {}, "weight.kept": {"keep": True}, "weight.alone": {"turn": False}}.items():
                how = {"power_of_two": power_of_two, **more}
                _same(bench, name, [casts.cast_weight(weight, **how)], [casts.cast_weight_reference(weight, **how)])
            _check_renewed(bench, casts, weight, power_of_two)
    if bench.device == "cuda":
        _check_masked(bench, casts)


def _check_renewed(bench: Bench, casts: Any, weight: Any, power_of_two: bool) -> None:
    """Blocks that changed are rounded again, the rest is left as it is."""
    kept = casts.cast_weight(weight, keep=True, power_of_two=power_of_two)
    other = weight.clone()
    other[1, 130, 5] *= -1  # the first block of the second row of blocks
    other[0, :, 128:256] *= 4
    kept.values[1, 0, 0] = 448.0  # in a block whose bits stay: what is not looked at again is not written
    casts.renew_weight(kept, other, power_of_two=power_of_two)
    wanted = casts.cast_weight_reference(other, keep=True, power_of_two=power_of_two)
    left = float(kept.values[1, 0, 0])
    bench.check("renewed.left-alone", left == 448.0, f"a mark in a block that did not change: {left}")
    kept.values[1, 0, 0] = wanted.values[1, 0, 0]
    _same(bench, "renewed", [kept], [wanted])


def _check_masked(bench: Bench, casts: Any) -> None:
    """The kernel and plain torch on a CPU, NaN past the counts."""
    rows = bench.randn(3, CAPACITY, WIDTH, dtype=BF16)
    rows[0, 3:], rows[1] = float("nan"), float("inf")
    counts = torch.tensor([3, 0, CAPACITY], dtype=torch.int32, device=bench.device)
    seen = casts.cast_masked(rows, counts)
    wanted = casts.cast_masked(rows.cpu(), counts.cpu())
    _same(bench, "masked", [tuple(one.cpu() for one in seen)], [wanted])


def _odd(bench: Bench, values: Any) -> Any:
    """In bf16, with rows and values as no normal distribution has them."""
    values = torch.where(bench.rand(*values.shape) < 1e-3, values * 1e3, values)
    values[0], values[3] = 0.0, values[3] * 1e-9
    values[5] *= 1e6
    values[:, 7] = values[:, 7] * 1e-6
    return values.to(BF16)


def _same(bench: Bench, name: str, seen: Any, wanted: Any) -> None:
    """Tensors of equal bytes, in equal places; None beside None."""
    pairs: list[tuple[Any, Any]] = []
    for one, other in zip(seen, wanted, strict=True):
        if (one is None) is not (other is None):
            return bench.check(name, False, "one copy was not made, or one too many")
        if one is not None:
            pairs += zip(one, other, strict=True)
    differ = [index for index, (one, other) in enumerate(pairs) if not _equal(one, other)]
    return bench.check(name, not differ, f"{len(pairs)} tensors, bit by bit; not the same: {differ or 'none'}")


def _equal(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)))
