"""Small A-blocks for the tests of the wrapper."""

from __future__ import annotations

from typing import Any

import torch

from megacpp_validate.bridge import features
from megacpp_validate.bridge.native_block import NativeBlock
from megacpp_validate.native.block import ABlock

SIZES: dict[str, Any] = {"hidden": 32, "ffn_hidden": 48, "num_heads": 4, "head_dim": 8, "num_gqa_groups": 2}
OFF = features.read_features("off")
TE_NAMES = {
    "qkv.layer_norm_weight", "qkv.query_weight", "qkv.key_weight", "qkv.value_weight", "out.weight",
    "mlp.layer_norm_weight", "mlp.fc1_weight", "mlp.fc2_weight",
}  # fmt: skip


def make(**changes: Any) -> NativeBlock:
    return NativeBlock(**{**SIZES, "dtype": torch.float32, "device": "cpu", **changes})


def state(activation: Any = "swiglu", dtype: Any = torch.float32) -> dict[str, Any]:
    torch.manual_seed(0)
    block = ABlock(*SIZES.values(), activation=activation, dtype=dtype)
    return {name: torch.randn_like(weight) * 0.3 for name, weight in block.state_dict().items()}


def rows(dtype: Any = torch.float32, length: int = 12) -> Any:
    torch.manual_seed(1)
    return torch.randn(2, length, SIZES["hidden"], dtype=dtype, requires_grad=True)


def plain(activation: Any = "swiglu", eps: float = 1e-5) -> ABlock:
    block = ABlock(*SIZES.values(), activation=activation, eps=eps)
    block.load_state_dict(state(activation))
    return block


class Recorder(torch.nn.Module):
    """Stands for one of TE's classes and keeps what it was made with."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given = given
