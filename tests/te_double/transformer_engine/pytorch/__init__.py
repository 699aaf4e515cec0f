"""The entry points of `transformer_engine.pytorch` that the bridge uses, in plain torch."""

from __future__ import annotations

from .attention import DotProductAttention
from .distributed import checkpoint
from .graph import make_graphed_callables
from .grouped_linear import GroupedLinear
from .layernorm_mlp import LayerNormMLP
from .linear import LayerNormLinear, Linear
from .padding import Fp8Padding, Fp8Unpadding
from .permutation import (
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from .quantization import autocast, fp8_autocast, fp8_model_init, quantized_model_init
from .rmsnorm import RMSNorm
from .transformer import TransformerLayer
