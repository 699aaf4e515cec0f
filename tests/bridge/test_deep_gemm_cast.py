"""Block-scaled casts: what the plain-torch reference gives, worked out by hand and by DeepGEMM's own formulas."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import deep_gemm as casts  # noqa: E402

COUNTS = (130, 0, 5, 128)


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
