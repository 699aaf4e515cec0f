"""Block-scaled casts: what the plain-torch reference gives, worked out by hand and by DeepGEMM's own formulas."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import deep_gemm as casts  # noqa: E402
from megacpp_validate.probes.references import round_blocks  # noqa: E402

COUNTS = (130, 0, 5, 128)


def dequantized(values: torch.Tensor, scales: torch.Tensor, high: int) -> torch.Tensor:
    wide = scales.double().repeat_interleave(high, -2).repeat_interleave(128, -1)
    return values.double() * wide


def test_tiles_hold_rows_of_one_expert_each() -> None:
    tiles = casts.plan_tiles(COUNTS, "cpu")
    first, real, expert, start, padded = tiles.table.tolist()
    assert first == [0, 128, 130, 135]
    assert real == [128, 2, 5, 128]
    assert expert == [0, 0, 2, 3]
    assert start == [0, 0, 256, 384]
    assert padded == [256, 256, 128, 128]
    assert tiles.padded == (256, 0, 128, 128)
    assert tiles.starts == [0, 256, 256, 384, 512]
    assert (tiles.rows, tiles.number) == (512, 4)
    assert tiles.table.dtype == torch.int32


@pytest.mark.parametrize("power_of_two", [False, True])
def test_rows_and_columns_are_the_rounded_tokens(power_of_two: bool) -> None:
    torch.manual_seed(0)
    tokens = torch.randn(sum(COUNTS), 256).bfloat16()
    tiles = casts.plan_tiles(COUNTS, "cpu")
    rows, vectors = casts.cast_tokens(tokens, tiles, columns="vectors", power_of_two=power_of_two)
    _, blocks = casts.cast_tokens(tokens, tiles, columns="blocks", power_of_two=power_of_two)
    assert rows.groups.tolist() == [0] * 130 + [-1] * 126 + [2] * 5 + [-1] * 123 + [3] * 128
    assert rows.scales.stride() == (1, tiles.rows), "side by side along the rows, as the kernel's copies want them"
    seen = dequantized(rows.values, rows.scales, 1)
    assert torch.equal(seen[rows.groups >= 0], round_blocks(tokens, 1, power_of_two))
    assert not seen[rows.groups < 0].any()
    done = 0
    for expert, count in enumerate(COUNTS):
        own, (first, last) = tokens[done : done + count], tiles.starts[expert : expert + 2]
        done += count
        for cast, wanted in (
            (vectors, round_blocks(own.T, 1, power_of_two)),
            (blocks, round_blocks(own, 128, power_of_two).T),
        ):
            values = cast.values[first * 256 : last * 256].view(256, last - first)
            scales = cast.scales[first // 128 : last // 128].T
            seen = dequantized(values, scales, 1 if cast is vectors else 128)
            assert torch.equal(seen[:, :count], wanted)
            assert not seen[:, count:].any()
