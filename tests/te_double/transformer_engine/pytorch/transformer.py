"""`TransformerLayer`."""

from __future__ import annotations

from typing import Any

import torch

from .attention import DotProductAttention
from .layer import only_defaults
from .layernorm_mlp import LayerNormMLP
from .linear import LayerNormLinear, Linear


class MultiheadAttention(torch.nn.Module):
    """Norm and projection, attention, projection. Rows of the first weight lie interleaved by group, as TE's."""

    def __init__(
        self, hidden: int, heads: int, groups: int, width: int, eps: float, norm: str, bias: bool, fused: bool,
        interleaved: bool, form: str, mask: str, dropout: float, dtype: Any, device: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.groups, self.width, self.interleaved = heads, groups, width, interleaved
        split = None if fused else {"query": heads * width, "key": groups * width, "value": groups * width}
        self.layernorm_qkv = LayerNormLinear(
            hidden, (heads + 2 * groups) * width, eps=eps, bias=bias, normalization=norm, parameters_split=split,
            params_dtype=dtype, device=device,
        )  # fmt: skip
        self.core_attention = DotProductAttention(
            heads, width, num_gqa_groups=groups, attention_dropout=dropout, qkv_format=form, attn_mask_type=mask
        )
        self.proj = Linear(heads * width, hidden, bias=bias, params_dtype=dtype, device=device)

    def forward(self, rows: Any, is_first_microbatch: bool | None = None) -> Any:
        """[B, T, hidden] -> [B, T, hidden]."""
        mixed = self.layernorm_qkv(rows, is_first_microbatch=is_first_microbatch)
        share = self.heads // self.groups
        if self.interleaved:
            query, key, value = mixed.view(*rows.shape[:2], self.groups, share + 2, self.width).split(
                [share, 1, 1], dim=-2
            )
        else:
            query, key, value = mixed.view(*rows.shape[:2], share + 2, self.groups, self.width).split(
                [share, 1, 1], dim=-3
            )
        query, key, value = (part.reshape(*rows.shape[:2], -1, self.width) for part in (query, key, value))
        seen = self.core_attention(query, key, value)
        return self.proj(seen, is_first_microbatch=is_first_microbatch)


class TransformerLayer(torch.nn.Module):
    """Attention and MLP with their norms and residuals: [B, T, hidden] -> [B, T, hidden]."""

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int,
        num_gqa_groups: int | None = None, layernorm_epsilon: float = 1e-5, hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1, init_method: Any = None, output_layer_init_method: Any = None,
        layer_number: int | None = None, kv_channels: int | None = None, self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None, bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0, enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None, enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: Any = None, tp_size: int = 1, params_dtype: Any = None, get_rng_state_tracker: Any = None,
        fuse_wgrad_accumulation: bool = False, seq_length: int | None = None,
        micro_batch_size: int | None = None, sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False, output_layernorm: bool = False,
        parallel_attention_mlp: bool = False, layer_type: str = "encoder", drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False, fuse_qkv_params: bool = False, rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False, qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False, ub_overlap_ag: bool = True, ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False, ub_bulk_dgrad: bool = True, ub_bulk_wgrad: bool = True,
        bias: bool = True, activation: str = "gelu", activation_params: Any = None,
        normalization: str = "LayerNorm", device: Any = "cuda", attn_input_format: str = "sbhd",
        name: str | None = None, qk_norm_type: str | None = None, qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False, softmax_type: str = "vanilla",
    ) -> None:  # fmt: skip
        done = ("num_gqa_groups", "layernorm_epsilon", "hidden_dropout", "attention_dropout", "init_method",
                "output_layer_init_method", "layer_number", "kv_channels", "self_attn_mask_type", "params_dtype",
                "seq_length", "micro_batch_size", "fuse_qkv_params", "qkv_weight_interleaved", "bias", "activation",
                "normalization", "device", "attn_input_format", "name")  # fmt: skip
        only_defaults(TransformerLayer.__init__, locals(), done)
        super().__init__()
        self.hidden_dropout = hidden_dropout
        self.self_attention = MultiheadAttention(
            hidden_size, num_attention_heads, num_gqa_groups or num_attention_heads,
            kv_channels or hidden_size // num_attention_heads, layernorm_epsilon, normalization, bias, fuse_qkv_params,
            fuse_qkv_params and qkv_weight_interleaved, attn_input_format, self_attn_mask_type, attention_dropout,
            params_dtype, device,
        )  # fmt: skip
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, eps=layernorm_epsilon, bias=bias, normalization=normalization,
            activation=activation, params_dtype=params_dtype, device=device,
        )  # fmt: skip

    def forward(
        self, hidden_states: Any, attention_mask: Any = None, self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None, bottom_right_diagonal: bool | None = None,
        encoder_output: Any = None, enc_dec_attn_mask: Any = None, enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None, enc_dec_bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None, checkpoint_core_attention: bool = False,
        inference_params: Any = None, rotary_pos_emb: Any = None, core_attention_bias_type: str = "no_bias",
        core_attention_bias: Any = None, alibi_slopes: Any = None, cu_seqlens_q: Any = None,
        cu_seqlens_kv: Any = None, cu_seqlens_q_padded: Any = None, cu_seqlens_kv_padded: Any = None,
        max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
    ) -> Any:  # fmt: skip
        """[B, T, hidden] -> [B, T, hidden]."""
        only_defaults(TransformerLayer.forward, locals(), ("is_first_microbatch", "fast_zero_fill"))
        attended = self.self_attention(hidden_states, is_first_microbatch=is_first_microbatch)
        rows = hidden_states + self._dropped(attended)
        return rows + self._dropped(self.layernorm_mlp(rows, is_first_microbatch=is_first_microbatch))

    def _dropped(self, rows: Any) -> Any:
        return torch.nn.functional.dropout(rows, self.hidden_dropout, training=self.training)
