"""Operations of the parts that a size turns on, beside a count by hand and the matrices of the model as it is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacpp_validate.bridge.features import PRESETS
from megacpp_validate.training.first_weights import layer_class
from megacpp_validate.training.layers import Build
from megacpp_validate.training.model import MtpJoin
from megacpp_validate.training.parallel.goodput import block_flops, forward_flops
from megacpp_validate.training.sizes import Size, read_size

pytestmark = pytest.mark.thorough

MLA = {"attention": "mla", "kv_latent": 16, "rope_dim": 4}


def products(layer: Any, size: Size) -> float:
    """2 for each weight that a token meets; of a bank of experts its share."""
    return 2.0 * sum(
        weight.numel() * (size.top_k / size.num_experts if weight.dim() == 3 else 1)
        for weight in layer.parameters()
        if weight.dim() > 1
    )


@pytest.mark.parametrize(("letter", "changes"), [("A", MLA), ("E", {"shared_experts": 3})])
def test_a_block_multiplies_by_the_matrices_that_it_has(letter: Any, changes: dict[str, Any]) -> None:
    size = read_size("tiny", **changes)
    layer = layer_class(letter, size)(size, Build(PRESETS["off"], torch.float32, "meta"))
    parts = block_flops(letter, size)
    assert sum(parts.values()) - parts.get("attention", 0) == products(layer, size)


def test_latent_attention_and_shared_experts_by_hand() -> None:
    """Tiny: 32 wide, 2 heads of 16, MLP of 64, 32 positions, experts of 32."""
    mla = block_flops("A", read_size("tiny", **MLA))
    query, down, up, out = 32 * 32, 32 * (16 + 4), 16 * (2 * 12 + 2 * 16), 32 * 32
    assert mla["projections"] == 2 * (query + down + up + out)
    assert mla["attention"] == 2 * 2 * 32 * 33 / 2
    assert mla["mlp"] == 2 * 3 * 32 * 64
    assert block_flops("E", read_size("tiny", shared_experts=2))["shared"] == 2 * 2 * 3 * 32 * 32


@pytest.mark.parametrize("pattern", ["ME", "MA"])
def test_the_head_of_the_token_after_the_next_one_is_counted(pattern: Any) -> None:
    size = read_size("tiny", pattern=pattern, mtp=True)
    plain = forward_flops(read_size("tiny", pattern=pattern))
    kinds = forward_flops(size)
    assert "mtp" not in plain
    assert {name: spent for name, spent in kinds.items() if name != "mtp"} == plain
    join = products(MtpJoin(size, Build(PRESETS["off"]), seed=0), size)
    assert kinds["mtp"] == join + sum(block_flops(pattern[-1], size).values()) + kinds["head"]
    assert join == 2 * 64 * 32
