"""Layers that gather and scatter as Transformer Engine's do under tensor parallelism, for ranks on the CPU.

Written after 2.20.2, pytorch/module: an input is viewed as [tokens, hidden], and gathered (LayerNormLinear,
LayerNormMLP) or summed and scattered (Linear, LayerNormMLP) along its first axis; the norm comes before the gather, and
its weight is marked `sequence_parallel`. They compute by this project's own layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from megacpp_validate.native.mlp import gated_activation
from megacpp_validate.native.norms import rms_norm
from megacpp_validate.training.parallel.tensor_layers import TensorBorder


class Split(nn.Module):
    def __init__(self, tp_group: Any, sequence_parallel: bool) -> None:
        super().__init__()
        self.border = TensorBorder(tp_group, sequence_parallel)

    def add(self, name: str, *shape: int, dtype: Any, marked: bool = False) -> None:
        weight = nn.Parameter(torch.zeros(*shape, dtype=dtype))
        weight.sequence_parallel = marked and self.border.sequence_parallel  # type: ignore[attr-defined]
        setattr(self, name, weight)

    def enter(self, rows: Any) -> Any:
        """[S, ..., hidden] -> [tokens of all ranks, hidden], whatever the axes between are."""
        return self.border.enter(rows.view(-1, rows.shape[-1]).unsqueeze(0))[0]

    def leave(self, rows: Any) -> Any:
        return self.border.leave(rows.view(-1, rows.shape[-1]).unsqueeze(0))[0]


class NormLinear(Split):
    def __init__(self, *, in_features: int, parameters_split: Any, eps: float, tp_size: int, tp_group: Any,
                 sequence_parallel: bool, params_dtype: Any, **rest: Any) -> None:  # fmt: skip
        assert rest.pop("parallel_mode") == "column"
        super().__init__(tp_group, sequence_parallel)
        self.eps, self.parts = eps, tuple(f"{name}_weight" for name in parameters_split)
        self.add("layer_norm_weight", in_features, dtype=params_dtype, marked=True)
        for name, rows in parameters_split.items():
            self.add(f"{name}_weight", rows // tp_size, in_features, dtype=params_dtype)

    def forward(self, inp: Any, is_first_microbatch: bool | None = None) -> Any:
        rows = self.enter(rms_norm(inp, self.layer_norm_weight, eps=self.eps))
        out = functional.linear(rows, torch.cat([getattr(self, name) for name in self.parts]))
        return out.view(-1, *inp.shape[1:-1], out.shape[-1])


class Linear(Split):
    def __init__(self, *, in_features: int, out_features: int, tp_size: int, tp_group: Any, sequence_parallel: bool,
                 params_dtype: Any, **rest: Any) -> None:  # fmt: skip
        assert rest.pop("parallel_mode") == "row"
        super().__init__(tp_group, sequence_parallel)
        self.add("weight", out_features, in_features // tp_size, dtype=params_dtype)

    def forward(self, inp: Any, is_first_microbatch: bool | None = None) -> Any:
        out = self.leave(functional.linear(inp, self.weight))
        return out.view(-1, *inp.shape[1:-1], out.shape[-1])


class NormMLP(Split):
    def __init__(self, *, hidden_size: int, ffn_hidden_size: int, eps: float, activation: Any, tp_size: int,
                 tp_group: Any, sequence_parallel: bool, params_dtype: Any, **rest: Any) -> None:  # fmt: skip
        assert rest.pop("set_parallel_mode") is True
        super().__init__(tp_group, sequence_parallel)
        self.eps, self.activation = eps, activation
        self.add("layer_norm_weight", hidden_size, dtype=params_dtype, marked=True)
        self.add("fc1_weight", 2 * ffn_hidden_size // tp_size, hidden_size, dtype=params_dtype)
        self.add("fc2_weight", hidden_size, ffn_hidden_size // tp_size, dtype=params_dtype)

    def forward(self, inp: Any, is_first_microbatch: bool | None = None) -> Any:
        rows = self.enter(rms_norm(inp, self.layer_norm_weight, eps=self.eps))
        inner = gated_activation(functional.linear(rows, self.fc1_weight), self.activation)
        out = self.leave(functional.linear(inner, self.fc2_weight))
        return out.view(-1, *inp.shape[1:-1], out.shape[-1])


def use_split_double() -> None:
    """Transformer Engine's double in this process, with layers that are split; its attention is given its own heads."""
    from megacpp_validate.bridge import imports as te
    from megacpp_validate.selftest.double import use_te_double

    te.TE._verdict = None
    use_te_double()
    whole = te.dot_product_attention.require()

    def attention(*, num_attention_heads: int, num_gqa_groups: int, tp_size: int, tp_group: Any, **given: Any) -> Any:
        return whole(
            num_attention_heads=num_attention_heads // tp_size, num_gqa_groups=num_gqa_groups // tp_size, **given
        )

    for entry, layer in ((te.layernorm_linear, NormLinear), (te.linear, Linear), (te.layernorm_mlp, NormMLP)):
        entry._found = (_split_where_asked(entry.require(), layer), "")
    te.dot_product_attention._found = (attention, "")


def _split_where_asked(whole: Any, split: Any) -> Any:
    def make(*, tp_size: int, **given: Any) -> Any:
        return whole(tp_size=tp_size, **given) if tp_size == 1 else split(tp_size=tp_size, **given)

    return make
